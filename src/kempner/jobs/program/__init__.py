"""One supervisor per rank for any program under run.sh. Nobody imports it."""

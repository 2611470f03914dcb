"""Tries the kit's promises on the user's own cluster: drill.sh. Nobody imports it."""

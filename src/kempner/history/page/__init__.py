"""`report.py --html`: runs as one self-contained page. write.py is the whole, run.py the section of
one run."""

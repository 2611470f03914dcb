"""`report.py --html`: runs as one self-contained page."""

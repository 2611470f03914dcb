"""Records for people: tables, pictures, notifications. For report.py and status.py."""

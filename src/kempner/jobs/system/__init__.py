"""One machine: files, processes, signals, a program's way in and out. For everybody."""

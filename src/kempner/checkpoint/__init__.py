"""Checkpoints: commit.py is the protocol on the file system, dcp.py what goes into one."""

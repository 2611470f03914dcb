"""Checkpoints. commit.py is the protocol on the file system, layout.py computes which rank writes
what, writer.py and reader.py are the data files, and checkpointer.py combines them for a run."""

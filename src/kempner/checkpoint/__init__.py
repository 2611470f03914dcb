"""Checkpoints. commit.py is the protocol on the file system, layout.py says which rank writes what,
writer.py and reader.py are the data files, and checkpointer.py puts them together for a run."""

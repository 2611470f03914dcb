"""Records of a run: its directory, the lines of its steps, measurements."""

"""The records that a run writes: its directory, the lines of its steps, measurements."""

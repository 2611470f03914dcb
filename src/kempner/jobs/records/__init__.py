"""The records of a run: their schema, and the one judge of what state it is in and what follows."""

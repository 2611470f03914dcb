"""The files of a checkpoint: which rank writes what; writing, reading, checksums."""

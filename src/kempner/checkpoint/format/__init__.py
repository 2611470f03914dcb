"""Files of a checkpoint: distribution over ranks, writing, reading, checksums."""

"""Detection of silent data corruption: steps computed twice, checksums, audits."""

"""Wrong numbers that nobody reports: steps that are computed twice, checksums, audits."""

"""The orchestrator: from tasks to batches of scored samples. No torch."""

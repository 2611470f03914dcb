"""The records of a run and what they tell: one schema (events), one judge of its state (state)."""

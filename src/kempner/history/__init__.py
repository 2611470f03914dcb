"""The records of a run and their evaluation: one schema (events), one judge of its state
(state)."""

"""Training on preferences: DPO and reward models."""

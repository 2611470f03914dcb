"""Training on preferences: of two answers to a prompt, one is the better."""

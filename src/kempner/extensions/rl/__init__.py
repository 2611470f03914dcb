"""Reinforcement learning: what trainer, engines and orchestrator hand each other."""

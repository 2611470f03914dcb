"""Reinforcement learning: a trainer, engines that sample from its model, and an orchestrator."""

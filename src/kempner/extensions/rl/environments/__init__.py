"""Sources of prompts and rewards: protocol.py is what an environment is."""

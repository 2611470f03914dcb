"""Where prompts and rewards come from. protocol.py is what an environment is, opening.py makes them
from the configuration, scorer.py asks them for rewards in limited processes."""

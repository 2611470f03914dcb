"""Less memory for activations: they are computed again, or kept on the host. For build.py."""

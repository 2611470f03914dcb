"""Less memory for activations, by recomputation or offloading to the host. For build.py."""

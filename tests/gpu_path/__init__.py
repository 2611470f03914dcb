"""The path of a GPU, tested without one."""

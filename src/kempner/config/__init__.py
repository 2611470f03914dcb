"""Configuration: option.py declares, loading.py merges, command_line.py sorts argv."""

"""The fastest settings of a configuration, by measurement: tune.py."""

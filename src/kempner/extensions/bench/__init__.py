"""`train.py --bench`: measures a configuration with fake data."""

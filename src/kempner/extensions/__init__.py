"""The parts that are built on the trainer. Each is loaded when one of its sections is used."""

"""The meeting of a job's ranks:
rendezvous, process group, ports, keys. For whoever starts ranks."""

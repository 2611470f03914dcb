"""Models in Hugging Face's form: into a run, and out of one."""

"""Models in Hugging Face format: into a run, and out of one."""

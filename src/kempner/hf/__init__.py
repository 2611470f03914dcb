"""Import and export of models in Hugging Face's form."""

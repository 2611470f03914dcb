"""Text from a model: prompts in, tokens drawn one by one, text out."""

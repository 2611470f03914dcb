"""Text generation: prompts in, tokens drawn one by one, text out."""

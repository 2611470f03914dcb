"""Text to token ids: tokenizers, chat templates, and the tokens that count in the loss."""

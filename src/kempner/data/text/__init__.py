"""Text to token ids: tokenizers, chat templates, which tokens count in the loss."""

"""A server for one model: OpenAI's requests over HTTP."""

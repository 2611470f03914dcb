"""A server for one model: requests over HTTP, as OpenAI has them."""

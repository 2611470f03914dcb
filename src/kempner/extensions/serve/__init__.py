"""One model over HTTP, with OpenAI's routes: serve.py."""

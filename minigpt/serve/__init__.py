"""The HTTP server of scripts/serve.py."""

"""A page that shows a model at work, on a server with the HTTP API of OpenAI, or in one file."""

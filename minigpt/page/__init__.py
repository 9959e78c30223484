"""One HTML page for every use: to play with served models, to hold a model, to show the attention of a text."""

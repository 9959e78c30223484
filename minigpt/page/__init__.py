"""The HTML page: to play with served models, or to hold a model itself."""

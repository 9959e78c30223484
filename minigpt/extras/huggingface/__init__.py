"""Start from and export to models and tokenizers of Hugging Face."""

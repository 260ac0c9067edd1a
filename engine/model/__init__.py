"""Models, tokenizers and adapters from Hugging Face, loaded with care and tried out."""

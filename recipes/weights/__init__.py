"""Initial weights, exported weights, and the names, configuration and files of Hugging Face folders."""

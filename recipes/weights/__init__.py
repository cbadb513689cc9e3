"""Weights from outside a run: names, configuration and files of Hugging Face folders, and values read for each shard."""

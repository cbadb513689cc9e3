"""Activation checkpointing: what of a block is kept for backward and what is computed again."""

"""Replaces parts of torch so that the meta device behaves like a CPU or a GPU."""

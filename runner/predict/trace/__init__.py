"""Runs the recipe on the meta device and records a trace."""

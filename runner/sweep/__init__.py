"""Combinations of a sweep -> run directories, and their execution."""

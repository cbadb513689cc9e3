"""Profiles the time or the memory of some measured steps."""

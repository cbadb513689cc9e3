"""Finds the change that made runs slower, larger or different: repeats runs until noise no longer decides."""

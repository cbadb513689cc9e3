"""Finds the fastest combination that fits, by predicting many combinations and running few."""

"""Finds the fastest combination that fits: many are predicted, and few are run."""

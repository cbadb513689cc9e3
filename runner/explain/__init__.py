"""Explains a difference between two runs: a ledger of the step time, from traced steps or from predictions."""

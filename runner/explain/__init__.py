"""Explains a difference between two runs: a ledger of the step time, from a traced step, and of the peak memory."""

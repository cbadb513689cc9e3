"""Run directories -> which settings vary, one row per combination, deltas, parity verdicts; as text, JSON, CSV and a page.

Reads files only: no torch, nothing of a run is executed.
"""

"""Explains how two runs differ in step time and memory, with ledgers: measured or predicted amounts that add up to a total."""

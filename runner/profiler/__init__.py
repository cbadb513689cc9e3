"""Profiling some of the measured steps: where their time goes, or what holds memory."""

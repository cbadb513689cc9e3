"""Profilers of some of the measured steps: their time, or their memory."""

"""Predicts the time of a step from a trace and the rates of a device."""

"""Fits the constants that predict speed to measured runs."""

"""Writes the page of a forecast with a chart of memory over a step."""

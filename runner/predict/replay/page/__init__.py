"""The page of a forecast, with memory over a step as a chart."""

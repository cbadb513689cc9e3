"""The page of a prediction: memory over a step, drawn."""

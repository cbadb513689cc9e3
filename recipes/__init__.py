"""Options such as models, parallelism, optimizers and data, and the recipe that combines one of each and trains the model."""

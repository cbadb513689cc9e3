"""Models, parallelism, precision, optimizers, data, and the recipe that combines them and trains the model."""

"""Models, parallelism, precision, optimizers, data, and the recipe that assembles and trains them."""

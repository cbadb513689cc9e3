"""What is run: models, parallelism, precision, optimizer, data and the recipe that assembles and trains them."""

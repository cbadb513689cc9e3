"""Text or random tokens -> a cache of packed tokens -> global batches by index -> each data-parallel rank's slice."""

"""A trace replayed through the allocator and the clock: memory over a step."""

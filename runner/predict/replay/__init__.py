"""A trace replayed through the allocator model and the device clock: memory over a step."""

"""Replays a trace through the allocator model and the device clock to find the memory over a step."""

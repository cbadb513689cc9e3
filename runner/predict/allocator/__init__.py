"""A model of torch's CUDA caching allocator."""

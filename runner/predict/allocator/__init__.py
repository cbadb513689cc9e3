"""Model of torch's CUDA caching allocator."""

"""Pipeline parallelism: ranks hold different blocks, and micro batches pass through them."""

"""FSDP2's communication buffers at fixed addresses: `placement` plans the addresses, and `buffer_pool` hands out the buffers."""

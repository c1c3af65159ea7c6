"""KV storage: pools, request table, allocator, scales."""

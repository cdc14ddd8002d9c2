"""specache_fx: a `torch.compile` backend that keeps the KV cache off the device."""

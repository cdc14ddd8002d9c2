"""specache_fx: a `torch.compile` backend that keeps the KV cache off the device.

model.compile(backend="specache", options={"bits": 1})
out = model.generate(**inputs, return_dict_in_generate=True)
specache_fx.stats(out.past_key_values)
"""

from specache_fx.api import SessionStats, compile, stats
from specache_fx.config import SpecacheConfig
from specache_fx.errors import (
    CacheHandleError,
    ConfigError,
    HostMemoryError,
    KernelUnavailableError,
    PassInvariantError,
    SpecacheError,
    UnsupportedGraphError,
)
from specache_fx.explain import Explanation, explain

__all__ = [
    "CacheHandleError",
    "ConfigError",
    "Explanation",
    "HostMemoryError",
    "KernelUnavailableError",
    "PassInvariantError",
    "SessionStats",
    "SpecacheConfig",
    "SpecacheError",
    "UnsupportedGraphError",
    "compile",
    "explain",
    "stats",
]

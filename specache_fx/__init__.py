"""specache_fx: a `torch.compile` backend that keeps the KV cache off the device.

model.compile(backend="specache", options={"bits": 1})
out = model.generate(**inputs, return_dict_in_generate=True)
specache_fx.stats(out.past_key_values)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specache_fx.config import SpecacheConfig
from specache_fx.errors import (
    CacheHandleError,
    ConfigError,
    HostMemoryError,
    KernelUnavailableError,
    PassInvariantError,
    SavedCacheError,
    SpecacheError,
    UnsupportedGraphError,
)

if TYPE_CHECKING:
    from specache_fx.api import compile, release, stats
    from specache_fx.calls.warming import warm_up
    from specache_fx.report.chrome_trace import trace
    from specache_fx.report.explanation import Explanation, explain
    from specache_fx.report.session_stats import SessionStats, StepHits
    from specache_fx.saved.loading import load
    from specache_fx.saved.prefix_store import PrefixStore
    from specache_fx.saved.saving import save

__all__ = [
    "CacheHandleError",
    "ConfigError",
    "Explanation",
    "HostMemoryError",
    "KernelUnavailableError",
    "PassInvariantError",
    "PrefixStore",
    "SavedCacheError",
    "SessionStats",
    "SpecacheConfig",
    "SpecacheError",
    "StepHits",
    "UnsupportedGraphError",
    "compile",
    "explain",
    "load",
    "release",
    "save",
    "stats",
    "trace",
    "warm_up",
]

# Names that need torch are imported at first access: else `specache-fx --help` takes seconds. No module of this package
# may have one of these names: importing it would put the module in the function's place.
_LAZY = {
    "SessionStats": "specache_fx.report.session_stats",
    "StepHits": "specache_fx.report.session_stats",
    "compile": "specache_fx.api",
    "release": "specache_fx.api",
    "stats": "specache_fx.api",
    "Explanation": "specache_fx.report.explanation",
    "explain": "specache_fx.report.explanation",
    "trace": "specache_fx.report.chrome_trace",
    "PrefixStore": "specache_fx.saved.prefix_store",
    "load": "specache_fx.saved.loading",
    "save": "specache_fx.saved.saving",
    "warm_up": "specache_fx.calls.warming",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

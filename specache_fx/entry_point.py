"""`torch.compile(model, backend="specache")` finds the backend here; looking it up precedes the model's first call.

The C++ libraries that the first call needs are loaded meanwhile, and built where they are not there.
"""

from __future__ import annotations

import torch

from specache_fx.backend import specache
from specache_fx.runtime.native.cpp_build import load_ahead

__all__ = ["specache"]

if not torch.cuda.is_available():
    load_ahead()

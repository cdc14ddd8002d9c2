"""Triton kernel that tells the device how long a cache is: no copy from the host, and nothing that waits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_quantized", "window_len", "num_selectable"])
def tell_lengths(lengths, num_quantized, window_len, num_selectable):
    """Write int32 `[3]`: tokens in codes, rows of the window, tokens that may be selected."""
    one = tl.arange(0, 1)
    tl.store(lengths + one, num_quantized)
    tl.store(lengths + 1 + one, window_len)
    tl.store(lengths + 2 + one, num_selectable)

"""A layer's decode step as one call into C++, on the CPU, where it differs from the last one in its length alone.

What Python does between two products of weights is slow: they have read so much that its own memory is cold. The two
steps around a group that fills, and all that is out of the ordinary, go by the ops one by one. The answers are the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specache_fx.runtime import native
from specache_fx.runtime.copy_engine import CopyEngine
from specache_fx.runtime.kernels import Kernel
from specache_fx.runtime.kernels.cpu import CpuKernel
from specache_fx.runtime.kernels.cpu.prepared import Prepared
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.score_buffers import ScoreBuffers


def plain_step(
    kernel: Kernel,
    cache: LayerCache,
    engine: CopyEngine,
    buffers: ScoreBuffers,
    layer: int,
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    counts: Callable[[], torch.Tensor] | None,
) -> torch.Tensor | None:
    """Wait, attend, select, append and prefetch.

    Args:
        kernel: The session's.
        cache: The layer's.
        engine: The session's.
        buffers: The session's.
        layer: Its index.
        own: The lanes' queries, keys and values, shapes as in `DecodeInputs`.
        scale: See `DecodeInputs`.
        softcap: See `DecodeInputs`.
        sinks: See `DecodeInputs`.
        counts: Gives the `counts` of `CpuKernel.step`; None for none.

    Returns:
        What attention gives, `[lanes, batch, num_heads, 1, value_dim]`; None, and nothing is done but the wait, where
        the ops have to do it.
    """
    prepared = cache.kernel_memory.get(CpuKernel.name)
    if not isinstance(prepared, Prepared) or not isinstance(kernel, CpuKernel) or native.addresses() is None:
        return None
    if not cache.has_room or not prepared.goes_on(own, scale, softcap):
        return None
    rows, _ = engine.wait(layer)
    wanted = engine.wanted(layer)
    if wanted is None or rows is not prepared.staged_rows:
        return None
    scored = 1 if counts is None else own[0].shape[0]
    scores = buffers.take_flat(scored * wanted.shape[0] * wanted.shape[1] * (cache.kv_len + 1))
    try:
        out = kernel.step(
            prepared, own, sinks, cache.window_len, scores, wanted, None if counts is None else counts()
        )
    finally:
        buffers.give_back(scores)
    cache.was_appended()
    engine.prefetch_wanted(layer)
    return out

"""What a kernel is given in a decode step: by a layer that keeps all tokens, and by one that keeps a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specache_fx.runtime.kernels import DecodeInputs, Expand
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.quant import Quantizer
from specache_fx.runtime.window_cache import WindowCache, WindowMask


@dataclass(slots=True)
class Lanes:
    """What the graph hands over, whatever the layer keeps; shapes as in `DecodeInputs`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    independent: bool
    softcap: float | None
    sinks: torch.Tensor | None
    expand: Expand | None = None


def layer_inputs(
    lanes: Lanes,
    cache: LayerCache,
    staged: tuple[torch.Tensor, torch.Tensor] | None,
    key_mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scored_lanes: int,
) -> DecodeInputs:
    """For a layer that keeps all tokens.

    Args:
        lanes: From the graph.
        cache: The layer's.
        staged: Rows that were prefetched, and their tokens. The layer's sinks go to the kernel with them.
        key_mask: Which tokens are real, bool `[batch, kv_len]`.
        bias: See `DecodeInputs`.
        scored_lanes: See `DecodeInputs`.
    """
    if cache.sinks is not None:
        staged = cache.sinks.staged(staged)
    rows, indices = (None, None) if staged is None else staged
    key_planes, value_planes = cache.planes
    return DecodeInputs(
        query=lanes.query,
        key=lanes.key,
        value=lanes.value,
        quantizer=cache.quantizer,
        key_planes=key_planes,
        value_planes=value_planes,
        num_quantized=cache.num_quantized,
        window_rows=cache.window_rows,
        window_len=cache.window_len,
        staged_rows=rows,
        staged_indices=indices,
        key_mask=key_mask,
        scale=lanes.scale,
        independent_lanes=lanes.independent,
        softcap=lanes.softcap,
        bias=bias,
        sinks=lanes.sinks,
        expand=lanes.expand,
        aggregation=cache.config.aggregation,
        scored_lanes=scored_lanes,
    )


def window_inputs(
    lanes: Lanes, cache: WindowCache, masks: Sequence[WindowMask | None], quantizer: Quantizer
) -> DecodeInputs:
    """For a layer that keeps a window at 16 bits: no codes, nothing staged.

    Args:
        lanes: From the graph.
        cache: The layer's.
        masks: What the model hides, one a lane; None where it has no mask.
        quantizer: Any; it has nothing to do.
    """
    visible, bias = cache.masked(masks, lanes.independent)
    return DecodeInputs(
        query=lanes.query,
        key=lanes.key,
        value=lanes.value,
        quantizer=quantizer,
        key_planes=(),
        value_planes=(),
        num_quantized=0,
        window_rows=cache.window(),
        window_len=cache.held,
        staged_rows=None,
        staged_indices=None,
        key_mask=None,
        scale=lanes.scale,
        independent_lanes=lanes.independent,
        visible=visible,
        softcap=lanes.softcap,
        bias=bias,
        sinks=lanes.sinks,
        expand=lanes.expand,
        scored_lanes=0,
    )

"""The Triton kernel: split-KV attention over packed KIVI codes, one read of the codes for all lanes of a group.

Three launches: the parts (`triton_decode`), their sum (`triton_merge`), the selection scores (`triton_scores`).
"""

from __future__ import annotations

from typing import Any

import torch

from specache_fx.runtime import triton_ops
from specache_fx.runtime.kernels.base import DecodeInputs
from specache_fx.runtime.kernels.exact_pairs import ExactPairsKernel
from specache_fx.runtime.kernels.triton_arguments import arguments_of, cut_keys, tile_widths

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of a tile: wider keys would not fit into registers. Exact products of float32 take more of them.
_MOST_CHANNELS = 256
_MOST_CHANNELS_FLOAT32 = 128
_MOST_LANES = 8


class TritonKernel:
    """Runs on NVIDIA GPUs, and on the CPU in Triton's interpreter.

    What it has no code for goes to `ExactPairsKernel` or the reference: other quantisers than KIVI's (`bits=16` too),
    aggregation "max", expansions, keys or values of more than 256 channels (128 of float32), dtypes that differ or are
    wider than float32.
    """

    name = "triton"

    def __init__(self) -> None:
        self._others = ExactPairsKernel()

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Say what is missing, or None."""
        return triton_ops.unavailable_reason(device)

    def attention(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with every lane; see `Kernel.attention`. Paper: SpeCache eq. 1, Algorithm 3."""
        return _launch(inputs) if supports(inputs) else self._others.attention(inputs)


def supports(inputs: DecodeInputs) -> bool:
    """Whether these inputs have the form that the Triton kernels are written for."""
    dtype = inputs.query.dtype
    most_channels = _MOST_CHANNELS_FLOAT32 if dtype == torch.float32 else _MOST_CHANNELS
    others = [inputs.key, inputs.value, *inputs.window_rows]
    if inputs.num_quantized:
        if not inputs.quantizer.is_affine:
            return False
        others += inputs.key_planes[1:] + inputs.value_planes[1:]
        if inputs.staged_rows is not None:
            others.append(inputs.staged_rows)
    return (
        inputs.expand is None
        and inputs.aggregation == "mean"
        and dtype in _DTYPES
        and all(x.dtype == dtype for x in others)
        and max(tile_widths(inputs)) <= most_channels
        and inputs.query.shape[0] <= _MOST_LANES
    )


def _launch(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    from specache_fx.runtime.kernels.triton_decode import partial_attention
    from specache_fx.runtime.kernels.triton_merge import merge_parts
    from specache_fx.runtime.kernels.triton_scores import selection_scores

    arguments = arguments_of(inputs)
    query = arguments["query"]
    lanes, batch, num_heads = query.shape[:3]
    num_kv_heads, value_dim = arguments["num_kv_heads"], arguments["VALUE_DIM"]
    kv_len = inputs.num_quantized + arguments["window_len"]
    tiles = batch * num_kv_heads
    arguments |= cut_keys(
        inputs.num_quantized, arguments["top_k"] + arguments["window_len"] + lanes, tiles, query.device
    )
    splits = arguments["splits"]

    part_max = query.new_empty((batch, lanes, num_heads, splits), dtype=torch.float32)
    arguments |= {
        "part_max": part_max,
        "part_sum": torch.empty_like(part_max),
        "part_out": part_max.new_empty((*part_max.shape, value_dim)),
        "norm": part_max.new_empty((batch, lanes, num_heads)),
    }
    out = query.new_empty((lanes, batch, num_heads, 1, value_dim))
    scores = part_max.new_empty((lanes, batch, num_kv_heads, kv_len + 1))
    with triton_ops.on(query.device):
        partial_attention[(tiles, splits, arguments["TILES"])](**_of(partial_attention, arguments))
        merge_parts[(batch * lanes * num_heads,)](
            out=out,
            sinks=triton_ops.pointer_or(inputs.sinks, query),
            num_heads=num_heads,
            HAS_SINKS=inputs.sinks is not None,
            BLOCK_S=16,
            **_of(merge_parts, arguments | {"VALUE_PAD": triton_ops.power_of_two(value_dim)}),
        )
        if inputs.num_scored:
            selection_scores[(tiles, splits)](out=scores, **_of(selection_scores, arguments))
    return out, scores[lanes - inputs.num_scored :]


def _of(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that a kernel takes."""
    return {name: arguments[name] for name in kernel.arg_names if name in arguments}

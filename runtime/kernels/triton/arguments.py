"""`DecodeInputs` as arguments of the Triton kernels, by the kernels' own names: pointers, strides, sizes, constants."""

from __future__ import annotations

import functools
from typing import Any

import torch

from specache_fx.runtime.kernels.base import DecodeInputs
from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.native.triton_ops import power_of_two
from specache_fx.runtime.quant import Planes
from specache_fx.runtime.quant.hadamard import block_size, rotation

_LEAST_COLUMNS = 16  # channels of a product's operands
_LEAST_ROWS = 8  # queries of a product in tensor cores
_MOST_ROWS = 16  # more take too many registers, each warp having an output of its own
_STRETCH = 64  # a stretch of 16-bit rows is a multiple of every tile that is tried
_STRETCH_OF_CODES = 256  # and one of codes
_PROGRAMS_PER_SM = 3  # that registers have room for at once: see `triton_configs`
_PROGRAMS_OF_INTERPRETER = 6
_SLOTS_AT_ONCE = 1024
_LONG_STRETCH = 1024  # tokens: longer ones spend their time in the same loop
_PARTS_AT_ONCE, _CHANNELS_AT_ONCE = 16, 32


def tile_widths(bits: int, dims: tuple[int, int]) -> tuple[int, int]:
    """Columns of a tile of keys and of values: whole bytes of a packed row, a power of two of them."""
    key, value = (max(power_of_two(-(-dim * bits // 8)) * (8 // bits), _LEAST_COLUMNS) for dim in dims)
    return key, value


def _cut_keys(num_quantized: int, num_rows: int, tiles: int, device: torch.device) -> dict[str, int]:
    """Cut the keys into stretches, so that the device has work however few query tiles there are.

    Args:
        num_quantized: Tokens in codes.
        num_rows: 16-bit rows: staged, window, the lanes' own.
        tiles: Batch rows times kv heads.
        device: Where the kernels run.

    Returns:
        `code_splits` stretches of `code_tokens` codes, then rows in stretches of `row_tokens`, `splits` in all. And
        the tuning key of a stretch's length: its power of two, up to a bound.
    """
    share = max(1, _programs(device) // tiles)
    row_tokens = _stretch(num_rows, share, _STRETCH)
    # All run at once: one that came after the others would have a multiprocessor for itself, and wait for its memory.
    of_codes = max(1, share - -(-num_rows // row_tokens))
    code_tokens = _stretch(num_quantized, of_codes, _STRETCH_OF_CODES if device.type == "cuda" else _STRETCH)
    code_splits = -(-num_quantized // code_tokens)
    return {
        "code_splits": code_splits,
        "code_tokens": code_tokens,
        "row_tokens": row_tokens,
        "splits": code_splits + -(-num_rows // row_tokens),
        "length_class": min(code_tokens, _LONG_STRETCH).bit_length(),
    }


def _stretch(keys: int, share: int, multiple: int) -> int:
    return max(1, -(-keys // (share * multiple))) * multiple


def arguments_of(inputs: DecodeInputs, lengths: torch.Tensor | None = None) -> dict[str, Any]:
    """Arguments of both passes over the keys, but for results. Copies only tensors with another layout.

    Args:
        inputs: See there.
        lengths: int32 on the device: tokens in codes, rows of the window, where launches read them there; `inputs` has
            those that there is room for then. None where launches say them.
    """
    query = inputs.query.contiguous()
    lanes, batch, num_heads, _, key_dim = query.shape
    num_kv_heads, value_dim = inputs.key.shape[2], inputs.value.shape[4]
    centred = inputs.num_quantized > 0 and inputs.quantizer.code_form == "centred"
    rows, heads = _query_tile(lanes, num_heads // num_kv_heads)
    key_pad, value_pad = tile_widths(_bits(inputs), (key_dim, value_dim))
    stored, staged = _stored(inputs, query), _staged(inputs, query)
    num_rows, kv_len = staged["top_k"] + inputs.window_len + lanes, inputs.num_quantized + inputs.window_len
    kv = triton_ops.dtype(query.dtype)
    return {
        "query": query,
        "own_key": inputs.key.contiguous(),
        "own_value": inputs.value.contiguous(),
        "batch": batch,
        "num_kv_heads": num_kv_heads,
        "scale": float(inputs.scale),
        # A rotated query is stored that many times smaller: in float16 it might not fit.
        "code_scale": float(inputs.scale) * (block_size(key_dim) if centred else 1),
        "softcap": float(inputs.softcap or 1.0),
        "BITS": _bits(inputs),
        "GROUP": inputs.quantizer.group_size if inputs.num_quantized else _STRETCH,
        "KEY_DIM": key_dim,
        "KEY_PAD": key_pad,
        "KEY_UNIT": 8 * stored["key_codes"].element_size(),
        "VALUE_DIM": value_dim,
        "VALUE_PAD": value_pad,
        "VALUE_UNIT": 8 * stored["value_codes"].element_size(),
        "NUM_GROUPS": num_heads // num_kv_heads,
        "LANES": lanes,
        "M": rows,
        "HEADS": heads,
        "TILES": -(-(num_heads // num_kv_heads) // heads),
        "KV": kv,
        "DOT": triton_ops.dtype(torch.float32) if triton_ops.interpreted() else kv,  # see `rounded`
        "HAS_SOFTCAP": inputs.softcap is not None,
        "HAS_MASK": inputs.key_mask is not None,
        "HAS_VISIBLE": inputs.visible is not None,
        "INDEPENDENT": inputs.independent_lanes,
        "CENTRED": centred,
        "HAS_CODES": inputs.num_quantized > 0,
        "code_query": torch.empty_like(query, dtype=torch.float32) if centred else query,
        "balance": inputs.key_planes[3].contiguous() if centred else query,
        **stored,
        **staged,
        **_masks(inputs, query),
        **_cut_keys(inputs.num_quantized, num_rows, batch * num_kv_heads, query.device),
        "lengths": triton_ops.pointer_or(lengths, query),
        "LENGTHS_IN_MEMORY": lengths is not None,
        "mask_stride": kv_len,
        "score_stride": kv_len + 1,
    }


def norms_of(query: torch.Tensor) -> torch.Tensor:
    """Memory for the normalisers of scores that `merge_parts` leaves for the selection."""
    lanes, batch, num_heads = query.shape[:3]
    return query.new_empty((batch, lanes, num_heads), dtype=torch.float32)


def parts_of(query: torch.Tensor, splits: int, value_dim: int) -> dict[str, torch.Tensor]:
    """Memory for partial results of stretches of keys; see `partial_attention`."""
    norms = norms_of(query)
    part_max = norms.new_empty((*norms.shape, splits))
    part_out = part_max.new_empty((*part_max.shape, value_dim))
    return {"part_max": part_max, "part_sum": torch.empty_like(part_max), "part_out": part_out}


def merge_arguments(
    inputs: DecodeInputs,
    arguments: dict[str, Any],
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    written: int = 0,
) -> dict[str, Any]:
    """Further arguments of `merge_parts` and `rotate_queries`; `kept`: the query's and the own keys' copies.

    `written`: see `StepFacts`.
    """
    query = arguments["query"]
    key_dim, value_dim = arguments["KEY_DIM"], arguments["VALUE_DIM"]
    return {
        "num_heads": query.shape[2],
        "turn": rotation(key_dim, query.device)[0] if arguments["CENTRED"] else query,
        "turn_back": rotation(value_dim, query.device)[1] if arguments["CENTRED"] else query,
        "sinks": triton_ops.pointer_or(inputs.sinks, query),
        "HAS_SINKS": inputs.sinks is not None,
        "kept_query": query if kept is None else kept[0],
        "kept_key": query if kept is None else kept[1],
        "KEEPS": kept is not None,
        "WRITTEN": written,
        "KEY_CHANNELS": power_of_two(key_dim),
        "VALUE_CHANNELS": power_of_two(value_dim),
        "BLOCK_S": _PARTS_AT_ONCE,
        "BLOCK_C": _CHANNELS_AT_ONCE,
    }


def taken_by(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that a kernel takes."""
    return {name: arguments[name] for name in kernel.arg_names if name in arguments}


def _stored(inputs: DecodeInputs, query: torch.Tensor) -> dict[str, Any]:
    """Planes and window, with their elements from head to head."""
    arguments: dict[str, Any] = {"num_quantized": inputs.num_quantized}
    sides: tuple[tuple[str, Planes, torch.Tensor], ...] = (
        ("key", inputs.key_planes, inputs.window_key),
        ("value", inputs.value_planes, inputs.window_value),
    )
    for side, planes, unstacked in sides:
        codes, scale, zero = (
            map(_stacked, planes[:3]) if inputs.num_quantized else (query.view(torch.uint8), query, query)
        )
        if inputs.num_quantized and _in_words(codes, inputs.quantizer.bits, query.dtype):
            codes = codes.view(torch.int32)
        window = _stacked(unstacked)
        arguments |= {
            f"{side}_codes": codes,
            f"{side}_scale": scale,
            f"{side}_zero": zero,
            f"{side}_stride": _stride(codes) if inputs.num_quantized else 0,
            f"{side}_scale_stride": _stride(scale) if inputs.num_quantized else 0,
            f"{side}_zero_stride": _stride(zero) if inputs.num_quantized else 0,
            f"window_{side}": window,
            f"window_{side}_stride": _stride(window),
            "window_len": window.shape[2],
        }
    return arguments


def _in_words(codes: torch.Tensor, bits: int, dtype: torch.dtype) -> bool:
    """Whether kernels read codes 32 bits at a time: see `triton_tiles`. 8-bit codes fill bfloat16's mantissa."""
    aligned = codes.shape[3] % 4 == 0 and codes.data_ptr() % 4 == 0
    return aligned and bits <= 4 and dtype != torch.float32


def _staged(inputs: DecodeInputs, query: torch.Tensor) -> dict[str, Any]:
    if inputs.staged_rows is None or inputs.staged_indices is None or not inputs.num_quantized:
        none = torch.empty(1, dtype=torch.int32, device=query.device)
        return {"staged_rows": query, "staged_indices": none, "top_k": 0, "BLOCK_T": 1, "ONE_PASS": True}
    top_k = inputs.staged_indices.shape[2]
    return {
        "staged_rows": inputs.staged_rows.contiguous(),
        "staged_indices": inputs.staged_indices.contiguous(),
        "top_k": top_k,
        "BLOCK_T": min(power_of_two(top_k), _SLOTS_AT_ONCE),
        # The compiler does not pipeline the loads of a loop that has a loop inside.
        "ONE_PASS": top_k <= _SLOTS_AT_ONCE,
    }


def _masks(inputs: DecodeInputs, query: torch.Tensor) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        name: triton_ops.pointer_or(None if mask is None else mask.contiguous().view(torch.uint8), query)
        for name, mask in (("key_mask", inputs.key_mask), ("visible", inputs.visible))
    }
    return arguments | bias_of(inputs.bias, query)


def bias_of(bias: torch.Tensor | None, query: torch.Tensor) -> dict[str, Any]:
    """Bias of the scores; see `DecodeInputs.bias`."""
    if bias is None:
        return {"bias": query, "bias_lane": 0, "bias_batch": 0, "bias_head": 0, "HAS_BIAS": False}
    bias = bias if bias.stride(3) == 1 else bias.contiguous()
    # One row for all batch rows or heads is read again and again.
    lane, batch, head, _ = (
        0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)
    )
    return {"bias": bias, "bias_lane": lane, "bias_batch": batch, "bias_head": head, "HAS_BIAS": True}


def _bits(inputs: DecodeInputs) -> int:
    # Without codes a row's channels are best read in their own order: that of codes of a byte each.
    return inputs.quantizer.bits if inputs.num_quantized else 8


def _query_tile(lanes: int, num_kv_groups: int) -> tuple[int, int]:
    """Rows of a query tile, and heads that each lane has in it."""
    lanes = power_of_two(lanes)
    heads = min(power_of_two(num_kv_groups), max(_MOST_ROWS // lanes, 1))
    heads = max(heads, _LEAST_ROWS // lanes)
    return lanes * heads, heads


def _stacked(x: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, rows, dim]` with rows one after the other, and heads at one distance: a view where it can be."""
    batch, heads, _, dim = x.shape
    rows = (x.stride(3) == 1 or dim == 1) and (x.stride(2) == dim or x.shape[2] <= 1)
    even = batch == 1 or heads == 1 or x.stride(0) == heads * x.stride(1)
    return x if rows and even else x.contiguous()


def _stride(x: torch.Tensor) -> int:
    """Elements from one head of `_stacked` to the next."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs that keep a device busy."""
    if device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

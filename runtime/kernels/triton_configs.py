"""The ways of running Triton's decode kernels that are tried out: tile sizes, warps, stages.

Apart from the kernels, because these numbers belong to machines. Triton tries them when a kernel first runs for a shape
(`TUNED_BY`), keeps the fastest, and remembers it on disk. Of a length the power of two counts, up to a bound
(`triton_arguments.length_class`): a growing context tunes a few times and compiles nothing. The interpreter gets one
config, for there is nothing to time.

Registers are capped: 168 a thread let three blocks of 4 warps run on a multiprocessor, 128 let four. At head_dim
128 nothing spills, with padding or without (`tests/runtime/test_triton_budgets.py`). Wider heads, biases and softcaps
would spill under a cap, so they have none.

None of these numbers has been measured on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from specache_fx.runtime.triton_ops import interpreted

# No tile has more than 64 tokens: which of them are staged are the bits of one number.
_SMALL = 32
_MOST_CAPPED_CHANNELS = 128

TUNED_BY = [
    *("BITS", "GROUP", "KEY_DIM", "VALUE_DIM", "NUM_GROUPS", "LANES", "M", "BLOCK_T", "CENTRED"),
    *("INDEPENDENT", "HAS_SOFTCAP", "HAS_BIAS", "HAS_MASK", "HAS_VISIBLE", "length_class"),
]
"""Arguments of both kernels that the fastest config may depend on; dtypes count anyway."""


LENGTHS = [
    *("num_quantized", "window_len", "top_k", "mask_stride", "score_stride"),
    *("code_splits", "splits", "code_tokens", "row_tokens", "length_class"),
]
"""Arguments of either kernel that Triton is not to make constants of."""


def decode_configs() -> list[triton.Config]:
    """For reading keys and values."""
    return _configs((64, 4, 2, 168), (64, 8, 2, 128), (32, 4, 3, 128))


def score_configs() -> list[triton.Config]:
    """For reading keys alone."""
    return _configs((64, 4, 2, 128), (32, 4, 3, 128))


def _configs(*forms: tuple[int, int, int, int]) -> list[triton.Config]:
    """Of each form: tokens of a tile, warps, stages, most registers of a thread."""
    if interpreted():
        return [triton.Config({"BLOCK_N": _SMALL})]
    return [
        triton.Config({"BLOCK_N": tokens}, num_warps=warps, num_stages=stages, maxnreg=registers)
        for tokens, warps, stages, registers in forms
    ]


def fitting(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Those whose tiles lie within a group of tokens (one scale a channel then); the small ones if none does.

    float32 always gets the small ones: its products are written out.
    """
    small = [config for config in configs if config.kwargs["BLOCK_N"] == _SMALL]
    single = kwargs["KV"] == tl.float32
    whole = [config for config in configs if kwargs["GROUP"] % config.kwargs["BLOCK_N"] == 0]
    chosen = small if single or not whole else whole
    channels = max(kwargs["KEY_PAD"], kwargs.get("VALUE_PAD", 0))
    forms = kwargs["HAS_SOFTCAP"] or kwargs["HAS_BIAS"]
    if single or forms or channels > _MOST_CAPPED_CHANNELS:
        return [triton.Config(each.kwargs, each.num_warps, each.num_stages) for each in chosen]
    return chosen

"""The ways of running Triton's decode kernels that are tried out: tile sizes, warps, stages.

Apart from the kernels, because these numbers belong to machines. Triton tries them when a kernel first runs for a shape
(`TUNED_BY`), keeps the fastest, and remembers it on disk. Of a length the power of two counts, up to a bound
(`triton_arguments.length_class`): a growing context tunes a few times and compiles nothing. The interpreter gets one
config, for there is nothing to time.

Registers are capped: 168 a thread let three blocks of 4 warps run on a multiprocessor, 128 let four. At head_dim 128
nothing spills, with padding or without, and a warp's instructions for 64 tokens have a budget
(`tests/unit/runtime/test_triton_budgets.py`). Wider heads, more than 8 queries a kv head, biases and softcaps would
spill under a cap, so they have none.

None of these numbers has been measured on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from specache_fx.runtime.native.triton_ops import interpreted

_SMALL = 16  # tokens of a part: of the smallest product
_OF_INTERPRETER = {"BLOCK_N": 32, "PARTS": 2}
_MOST_CAPPED_CHANNELS = 128
_MOST_CAPPED_ROWS = 8  # of a query tile

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
    return _configs((64, 4, 2, 168), (32, 4, 3, 168), (_SMALL, 4, 2, 168))


def score_configs() -> list[triton.Config]:
    """For reading keys alone."""
    return _configs((64, 4, 2, 128), (32, 4, 3, 128), (_SMALL, 4, 3, 128))


def _configs(*forms: tuple[int, int, int, int]) -> list[triton.Config]:
    """Of each form: tokens of a part, warps and thus parts, stages, most registers of a thread."""
    if interpreted():
        return [triton.Config(_OF_INTERPRETER)]
    return [
        triton.Config(
            {"BLOCK_N": tokens, "PARTS": warps}, num_warps=warps, num_stages=stages, maxnreg=registers
        )
        for tokens, warps, stages, registers in forms
    ]


def fitting(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Those whose parts lie within a group of tokens: their scales and means meet sums, and not each number.

    The small ones where no part does, and where each number has a scale of its own: of KIVI's codes they take more
    registers. float32 gets them too: its products are written out.
    """
    if interpreted():
        return configs
    small = [config for config in configs if config.kwargs["BLOCK_N"] == _SMALL]
    single = kwargs["KV"] == tl.float32
    whole = [config for config in configs if kwargs["GROUP"] % config.kwargs["BLOCK_N"] == 0]
    chosen = small if single or not kwargs["CENTRED"] else whole or small
    channels = max(kwargs["KEY_PAD"], kwargs.get("VALUE_PAD", 0))
    forms = kwargs["HAS_SOFTCAP"] or kwargs["HAS_BIAS"]
    if single:  # by all warps together: each one's own operands would not fit into shared memory
        return [
            triton.Config({**each.kwargs, "PARTS": 1}, each.num_warps, each.num_stages) for each in chosen
        ]
    if forms or channels > _MOST_CAPPED_CHANNELS or kwargs["M"] > _MOST_CAPPED_ROWS:
        return [triton.Config(each.kwargs, each.num_warps, each.num_stages) for each in chosen]
    return chosen

"""Rules of two lanes at once for operators that `torch.vmap` has none for.

Without a rule vmap calls an operator once for each lane and stacks the results: right, but each weight is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Products of each token with its own expert's weight, over tokens sorted by expert: transformers' own operator, and
# PyTorch's, which transformers takes where it can run.
_GROUPED = ("transformers::grouped_mm_fallback", "aten::_grouped_mm")
# Products of rows with a packed weight of 4 or 8 bits; of rows in int8 with a weight in int8. For a single row of the
# latter, as a lane of batch 1 has, torch 2.13 computes garbage on the CPU where Inductor gives it strides (0, 1).
_PACKED = (
    "aten::_weight_int4pack_mm",
    "aten::_weight_int4pack_mm_for_cpu",
    "aten::_weight_int8pack_mm",
    "aten::_int_mm",
)

# Collectives of tensor parallelism. Some join or cut rows: with the lanes behind these, one call serves all lanes.
_ALONG_ROWS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_ELEMENTWISE = ("all_reduce", "broadcast")


def register_batching_rules() -> None:
    """Register the rules of the operators that exist by now; cheap to call again."""
    for names, rule in ((_GROUPED, _grouped), (_PACKED, _packed)):
        for name in names:
            namespace, op = name.split("::")
            if hasattr(getattr(torch.ops, namespace), op):
                _register(name, rule)
    if torch.distributed.is_available():
        for name in _ELEMENTWISE:
            _register(f"_c10d_functional::{name}", partial(_collective, 0))
        for name in _ALONG_ROWS:
            _register(f"_c10d_functional::{name}", partial(_collective, 1))
        _register("_c10d_functional::wait_tensor", _wait)


_registered: dict[str, torch.library.Library] = {}  # rules end with their library


def _register(name: str, rule: Callable[..., Any]) -> None:
    """Register a rule, which gets the operator first, then what vmap gives."""
    if name not in _registered:
        namespace, op = name.split("::")
        _registered[name] = torch.library.Library(namespace, "FRAGMENT")
        bound = partial(rule, getattr(getattr(torch.ops, namespace), op).default)
        torch.library.register_vmap(name, bound, lib=_registered[name])


def _grouped(
    call: Any, info: Any, in_dims: Sequence[int | None], tokens: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, int]:
    offsets = rest[0] if rest else None
    if in_dims[1] is not None or offsets is None or any(dim is not None for dim in in_dims[3:]):
        return _one_by_one(call, info.batch_size, in_dims, (tokens, weight, *rest)), 0
    lanes = [
        side.expand(info.batch_size, *side.shape) if dim is None else side.movedim(dim, 0)
        for side, dim in ((tokens, in_dims[0]), (offsets, in_dims[2]))
    ]
    return _merged(call, lanes[0], weight, lanes[1], rest[1:]), 0


def _packed(
    call: Any, info: Any, in_dims: Sequence[int | None], rows: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, int]:
    if in_dims[0] is None or any(dim is not None for dim in in_dims[1:]):
        return _one_by_one(call, info.batch_size, in_dims, (rows, weight, *rest)), 0
    lanes = rows.movedim(in_dims[0], 0)  # [lanes, rows, features]: rows don't know each other
    return call(lanes.flatten(0, 1), weight, *rest).unflatten(0, lanes.shape[:2]), 0


def _collective(
    place: int, call: Any, info: Any, in_dims: Sequence[int], x: Tensor, *rest: Any
) -> tuple[Tensor, int]:
    return call(x.movedim(in_dims[0], place).contiguous(), *rest), place


def _wait(call: Any, info: Any, in_dims: Sequence[int], x: Tensor) -> tuple[Tensor, int]:
    return call(x), in_dims[0]  # it waits for the very tensor: a contiguous copy may come too early


def _merged(call: Any, tokens: Tensor, weight: Tensor, offsets: Tensor, rest: tuple[Any, ...]) -> Tensor:
    """One product for the tokens of every lane, sorted by expert again.

    Args:
        call: The operator.
        tokens: `[lanes, tokens, features]`, sorted by expert within a lane.
        weight: `[experts, features, outputs]`, of every lane.
        offsets: int `[lanes, experts]`: where each expert's tokens end. Tokens after the last one have no expert.
        rest: Further arguments.
    """
    lanes, num_tokens, _ = tokens.shape
    index = torch.arange(num_tokens, device=tokens.device, dtype=offsets.dtype)
    expert = (index[None, :, None] >= offsets[:, None, :]).sum(-1)
    order = torch.argsort(expert.flatten(), stable=True)
    # Counts of all lanes add up, and so do their running sums.
    out = call(tokens.flatten(0, 1)[order], weight, offsets.sum(0, dtype=offsets.dtype), *rest)
    return out[torch.argsort(order)].unflatten(0, (lanes, num_tokens))


def _one_by_one(call: Any, lanes: int, in_dims: Sequence[int | None], args: tuple[Any, ...]) -> Tensor:
    pairs = list(zip(args, in_dims, strict=True))
    one = [[arg if dim is None else arg.select(dim, i) for arg, dim in pairs] for i in range(lanes)]
    return torch.stack([call(*each) for each in one])

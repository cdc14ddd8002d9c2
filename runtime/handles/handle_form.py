"""The form of a cache: its dimensions outside of the graph, in the notation of einops.

    batch heads tokens channels        heads first: the form that every graph takes
    batch tokens heads channels        tokens first
    batch tokens (heads channels)      a projection as it comes
    pair batch heads tokens channels   keys, then values, in one tensor

A handle (`handle.py`) has a stride for each axis, so that all forms look at one storage: `head_dim` over the batch, 2
over heads, 1 over tokens and channels. Keys and values of a layer lie one after the other. A session knows the forms of
its handles.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

HEAD_STRIDE = 2  # elements; not that of tokens, so that the two can be told apart
AXES = ("batch", "heads", "tokens", "channels")
PAIR = "pair"
HEADS_FIRST = " ".join(AXES)
TOKENS_FIRST = "batch tokens heads channels"
_LEAST_CHANNELS = 3  # of a handle


@functools.cache
def dims_of(form: str) -> tuple[tuple[str, ...], ...]:
    """The axes in each dimension of a form."""
    return tuple(tuple(dim.strip("()").split()) for dim in re.findall(r"\([^)]*\)|\w+", form))


def form_of(dims: Sequence[Sequence[str]]) -> str:
    """The form with these axes in its dimensions."""
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)


def token_dim(form: str) -> int:
    """The dimension of tokens."""
    return dims_of(form).index(("tokens",))


def _forms() -> Iterator[str]:
    orders: list[list[tuple[str, ...]]]
    orders = [[(axis,) for axis in order] for order in itertools.permutations(AXES)]
    orders += [[(first,), (second,), AXES[1::2]] for first, second in itertools.permutations(AXES[::2])]
    pairs = [[*dims[:i], (PAIR,), *dims[i:]] for dims in orders for i in range(len(dims))]
    for dims in (*orders, *pairs):
        last = [axis for dim in dims for axis in dim][-2:]
        if last[-1] == "channels" or last == [
            "channels",
            "tokens",
        ]:  # `first_code` reads a handle along these
            yield form_of(dims)


MOST_DIMS = 5
"""Of a form."""
FORMS = tuple(_forms())
"""The forms of caches that are supported; of two that fit, the first one counts."""
FOLDED = "(batch heads) tokens channels", "tokens (batch heads) channels"
"""Forms of a call's tokens, and of no cache; the second one where a single sequence has no batch."""


def num_sides(form: str) -> int:
    """2 of a pair, 1 of keys or values alone."""
    return 1 + ((PAIR,) in dims_of(form))


def order_of(form: str) -> list[int]:
    """Where batch, heads, tokens and channels are among the axes of a form, its pair left out."""
    axes = [axis for dim in dims_of(form) for axis in dim if axis != PAIR]
    return [axes.index(axis) for axis in AXES]


Step = tuple[str, tuple[Any, ...]]
"""A view: the method of a tensor, and its arguments."""


def steps_to_side(form: str, num_kv_heads: int, side: int) -> list[Step]:
    """The views that make a side with heads first of a cache in a form."""
    dims, steps = dims_of(form), list[Step]()
    if (PAIR,) in dims:
        steps.append(("select", (dims.index((PAIR,)), side)))
    if (merged := _merged(form)) is not None:
        sizes = (-1, num_kv_heads) if form in FOLDED else (num_kv_heads, -1)
        steps.append(("unflatten", (merged, sizes)))
    return steps + _permuted(order_of(form))


def steps_from_side(form: str) -> list[Step]:
    """The views that make of a side with heads first what a cache in a form has of it, without the pair."""
    order = order_of(form)
    steps = _permuted([order.index(dim) for dim in range(4)])
    return steps if (merged := _merged(form)) is None else [*steps, ("flatten", (merged, merged + 1))]


def _permuted(order: list[int]) -> list[Step]:
    moved = [dim for i, dim in enumerate(order) if i != dim]
    if len(moved) == 2:
        return [("transpose", tuple(sorted(moved)))]
    return [("permute", (order,))] if moved else []


def _merged(form: str) -> int | None:
    """The dimension of heads that are merged with another axis, without that of a pair."""
    dims = [dim for dim in dims_of(form) if dim != (PAIR,)]
    return next((i for i, dim in enumerate(dims) if len(dim) > 1), None)


def sides_of(tensor: torch.Tensor, form: str, num_kv_heads: int, *, is_handle: bool) -> list[torch.Tensor]:
    """The parts of a cache with heads first: itself, or its keys and its values. Views.

    Args:
        tensor: In this form; with heads first it is returned itself, for its session may know it (`Newest`).
        form: The form.
        num_kv_heads: KV heads.
        is_handle: It is a handle or a copy of one, and not numbers.
    """
    sides = [tensor] * num_sides(form)
    for side in range(len(sides)):
        for name, args in steps_to_side(form, num_kv_heads, side):
            apart = is_handle and name == "unflatten"
            look = sides[side]
            sides[side] = _handle_apart(num_kv_heads, look) if apart else getattr(look, name)(*args)
    return sides


def _handle_apart(num_kv_heads: int, side: torch.Tensor) -> torch.Tensor:
    """Elements that lie behind those of the first head are the other heads', as far as they are at stride 2."""
    (*shape, width), (*strides, channels) = side.shape, side.stride()
    sizes = (*shape, num_kv_heads, width // num_kv_heads)
    return side.as_strided(sizes, (*strides, HEAD_STRIDE * channels, channels))


def joined(sides: Sequence[torch.Tensor], form: str) -> torch.Tensor:
    """Numbers `[batch, num_kv_heads, kv_len, head_dim]` in a form: a view, but for merged heads and pairs."""
    for name, args in steps_from_side(form):
        sides = [getattr(side, name)(*args) for side in sides]
    return torch.stack(list(sides), dims_of(form).index((PAIR,))) if len(sides) > 1 else sides[0]


def is_laid_out(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides of a handle, which no tensor of numbers has: heads 2, tokens and channels 1."""
    if tensor.dim() not in (3, 4, 5):
        return False
    close = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 1]
    known = [size for size in close if isinstance(size, int)]  # a symbol would get a guard
    if len(close) != 2 or max(known, default=0) < _LEAST_CHANNELS:
        return False
    pair = any(isinstance(size, int) and size == 2 for size in tensor.shape)
    is_merged = tensor.stride(-1) == 1 and (tensor.dim() == 3 or (tensor.dim() == 4 and pair))
    return HEAD_STRIDE in tensor.stride() or is_merged


def is_whole(handle: torch.Tensor) -> bool:
    """Whether the strides are those of a handle with heads first: all heads and tokens, one after the other."""
    wanted, strides = (handle.shape[3], HEAD_STRIDE, 1, 1), handle.stride()
    return strides == wanted or all(
        size <= 1 or stride == want for size, stride, want in zip(handle.shape, strides, wanted, strict=True)
    )


def layout_in(handles: Sequence[torch.Tensor], form: str) -> tuple[list[int], list[int]]:
    """Shape and strides of handles in a form, from where the first one begins.

    Args:
        handles: `[batch, num_kv_heads, kv_len, head_dim]` each: one, or the keys' and the values' of a layer.
        form: The form.
    """
    first = handles[0]
    sizes: dict[str, int] = dict(zip(AXES, first.shape, strict=True))
    strides: dict[str, int] = dict(zip(AXES, first.stride(), strict=True))
    sizes[PAIR] = len(handles)
    strides[PAIR] = int(handles[-1].storage_offset() - first.storage_offset())
    dims = dims_of(form)
    return [math.prod(sizes[axis] for axis in dim) for dim in dims], [strides[dim[-1]] for dim in dims]


def in_form(handles: Sequence[torch.Tensor], form: str) -> torch.Tensor:
    """The same handles in a form; shares the storage.

    Args:
        handles: See `layout_in`.
        form: Not `HEADS_FIRST`, which they have.
    """
    first = handles[0]
    place = (first.untyped_storage(), first.storage_offset(), *layout_in(handles, form))
    alone = torch.empty(0, dtype=first.dtype, device=first.device).set_(*place)  # no view, see `handle.py`
    torch._dynamo.maybe_mark_dynamic(alone, token_dim(form))
    return alone

"""The form of a handle: its dimensions outside of the graph, and the strides by which all forms are one storage.

    heads first       [batch, num_kv_heads, kv_len, head_dim]      strides (head_dim, 2, 1, 1)
    tokens first      [batch, kv_len, num_kv_heads, head_dim]      strides (head_dim, 1, 2, 1)
    sequence first    [kv_len, batch, num_kv_heads, head_dim]      strides (1, head_dim, 2, 1)
    tokens last       [batch, num_kv_heads, head_dim, kv_len]      strides (head_dim, 2, 1, 1)
    heads merged      [batch, kv_len, num_kv_heads * head_dim]     strides (head_dim, 1, 1)

Elements are those of `handle.py`. The graph takes every cache with heads first. A session knows the forms of its
handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch

HEAD_STRIDE = 2  # elements; not that of tokens, so that the two can be told apart


class Form(StrEnum):
    """The dimensions of keys or values outside of the graph."""

    HEADS_FIRST = "heads first"  # [batch, num_kv_heads, kv_len, head_dim]
    TOKENS_FIRST = "tokens first"  # [batch, kv_len, num_kv_heads, head_dim]
    SEQUENCE_FIRST = "sequence first"  # [kv_len, batch, num_kv_heads, head_dim]
    TOKENS_LAST = "tokens last"  # [batch, num_kv_heads, head_dim, kv_len]
    HEADS_MERGED = "heads merged"  # [batch, kv_len, num_kv_heads * head_dim]


ORDERS = {
    Form.HEADS_FIRST: (0, 1, 2, 3),
    Form.TOKENS_FIRST: (0, 2, 1, 3),
    Form.SEQUENCE_FIRST: (1, 2, 0, 3),
    Form.TOKENS_LAST: (0, 1, 3, 2),
}
"""Of each form with four dimensions: where batch, heads, tokens and channels are."""


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another one."""
    return [order.index(dim) for dim in range(len(order))]


def from_heads_first(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """`[batch, num_kv_heads, kv_len, head_dim]` in a form: a view, except for merged heads."""
    if form is Form.HEADS_MERGED:
        return tensor.transpose(1, 2).flatten(2)
    return tensor.permute(inverse(ORDERS[form]))


def is_laid_out(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides of a handle, which no tensor of numbers has: heads 2, tokens and channels 1."""
    if tensor.dim() == 3:
        return tensor.shape[2] > 1 and tensor.stride()[1:] == (1, 1)
    return tensor.dim() == 4 and any(
        [tensor.stride(dim) for dim in order[1:]] == [HEAD_STRIDE, 1, 1] for order in ORDERS.values()
    )


def to_heads_first(tensor: torch.Tensor, form: Form, num_kv_heads: int) -> torch.Tensor:
    """A handle, or a copy of one, as `[batch, num_kv_heads, kv_len, head_dim]`: itself, or a view."""
    if form is Form.HEADS_FIRST:
        return tensor  # the very handle: its session may know it (`Newest`)
    if form is not Form.HEADS_MERGED:
        return tensor.permute(ORDERS[form])
    # Elements that lie behind those of the first head are the other heads', as far as they are at stride 2.
    (batch, kv_len, width), (rows, tokens, channels) = tensor.shape, tensor.stride()
    sizes = (batch, num_kv_heads, kv_len, width // num_kv_heads)
    return tensor.as_strided(sizes, (rows, HEAD_STRIDE * channels, tokens, channels))


def is_whole(handle: torch.Tensor) -> bool:
    """Whether the strides are those of a handle with heads first: all heads and tokens, one after the other."""
    wanted, strides = (handle.shape[3], HEAD_STRIDE, 1, 1), handle.stride()
    return strides == wanted or all(
        size <= 1 or stride == want for size, stride, want in zip(handle.shape, strides, wanted, strict=True)
    )


def in_form(handle: torch.Tensor, form: Form) -> torch.Tensor:
    """The same handle in a form; shares the storage.

    Args:
        handle: `[batch, num_kv_heads, kv_len, head_dim]`.
        form: Not `HEADS_FIRST`, which it has.
    """
    batch, heads, kv_len, dim = handle.shape
    rows, _, tokens, channels = handle.stride()
    look = (
        handle.as_strided((batch, kv_len, heads * dim), (rows, tokens, channels))
        if form is Form.HEADS_MERGED
        else from_heads_first(handle, form)
    )
    place = (handle.untyped_storage(), handle.storage_offset(), look.shape, look.stride())
    alone = torch.empty(0, dtype=handle.dtype, device=handle.device).set_(*place)  # no view, see `handle.py`
    torch._dynamo.maybe_mark_dynamic(alone, token_dim(form))
    return alone


def token_dim(form: Form) -> int:
    """The dimension of tokens."""
    return 1 if form is Form.HEADS_MERGED else ORDERS[form][2]

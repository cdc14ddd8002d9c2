"""The form of a handle: its dimensions outside of the graph, and the strides by which all forms are one storage.

    heads first     [batch, num_kv_heads, kv_len, head_dim]      strides (head_dim, 2, 1, 1)
    tokens first    [batch, kv_len, num_kv_heads, head_dim]      strides (head_dim, 1, 2, 1)
    heads merged    [batch, kv_len, num_kv_heads * head_dim]     strides (head_dim, 1, 1)

Elements are those of `handle.py`. The graph takes every cache with heads first.
"""

from __future__ import annotations

from enum import StrEnum

import torch

HEAD_STRIDE = 2  # elements; not that of tokens, so that the two can be told apart


class Form(StrEnum):
    """The dimensions of keys or values outside of the graph."""

    HEADS_FIRST = "heads first"  # [batch, num_kv_heads, kv_len, head_dim]
    TOKENS_FIRST = "tokens first"  # [batch, kv_len, num_kv_heads, head_dim]
    HEADS_MERGED = "heads merged"  # [batch, kv_len, num_kv_heads * head_dim]


def is_laid_out(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides of a handle, which no tensor of numbers has: heads 2, tokens and channels 1."""
    if tensor.dim() == 3:
        return tensor.shape[2] > 1 and tensor.stride()[1:] == (1, 1)
    return tensor.dim() == 4 and tensor.stride()[1:] in ((HEAD_STRIDE, 1, 1), (1, HEAD_STRIDE, 1))


def form_of(tensor: torch.Tensor, num_kv_heads: int) -> Form | None:
    """The form of a handle or of a copy of one; None of a copy with as many tokens as heads, which tells nothing."""
    if tensor.dim() == 3:
        return Form.HEADS_MERGED
    if is_laid_out(tensor):
        return Form.TOKENS_FIRST if tensor.stride(2) == HEAD_STRIDE else Form.HEADS_FIRST
    if tensor.shape[1] == tensor.shape[2] and num_kv_heads > 1:
        return None
    return Form.HEADS_FIRST if tensor.shape[1] == num_kv_heads else Form.TOKENS_FIRST


def heads_first(tensor: torch.Tensor, form: Form, num_kv_heads: int) -> torch.Tensor:
    """A handle, or a copy of one, as `[batch, num_kv_heads, kv_len, head_dim]`: a view."""
    if form is Form.HEADS_FIRST:
        return tensor
    if form is Form.TOKENS_FIRST:
        return tensor.transpose(1, 2)
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
    rows, of_heads, tokens, channels = handle.stride()
    shape: tuple[int, ...] = (batch, kv_len, heads, dim)
    strides: tuple[int, ...] = (rows, tokens, of_heads, channels)
    if form is Form.HEADS_MERGED:
        shape, strides = (batch, kv_len, heads * dim), (rows, tokens, channels)
    place = (handle.untyped_storage(), handle.storage_offset(), shape, strides)
    alone = torch.empty(0, dtype=handle.dtype, device=handle.device).set_(*place)  # no view, see `handle.py`
    torch._dynamo.maybe_mark_dynamic(alone, 1)
    return alone

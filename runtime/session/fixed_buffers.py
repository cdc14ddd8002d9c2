"""Buffers of a fixed length that a model keeps its cache in, and writes in place: turned into handles.

Such a buffer stays the object that the model has. Its memory is given back: from then on it is a handle of all its
rows (`handle_tensor.py`), whatever number of them are tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from specache_fx.errors import CacheHandleError
from specache_fx.runtime.handles import handle as handles
from specache_fx.runtime.handles.handle_form import dims_of, is_laid_out, layout_in, num_sides, sides_of
from specache_fx.runtime.handles.handle_tensor import Handle, bare, mark, plain, unmark
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.claims import ELSEWHERE
from specache_fx.runtime.session.give_back import numbers_of

_WRITTEN = (
    "A buffer that holds a model's cache was written to since the model was called. It holds placeholders, so"
    " the write is lost. Start from the prompt, at position 0."
)


_LOST = "specache_lost"  # attribute: `_version` of a buffer whose tokens are gone


class Extent(NamedTuple):
    """A buffer's sizes.

    Attributes:
        capacity: Tokens that it has room for.
        rows: Sequences that it has room for; 0: the session's batch.
        form: See `handle_form.py`.
    """

    capacity: int
    rows: int
    form: str


@contextlib.contextmanager
def _mode_of(buffer: torch.Tensor) -> Iterator[None]:
    with torch.inference_mode(buffer.is_inference()), torch.no_grad(), bare():
        yield


def hold(buffers: Sequence[torch.Tensor], issued: Sequence[torch.Tensor], extents: Sequence[Extent]) -> None:
    """Make buffers handles of a session, whose memory they so give back.

    Args:
        buffers: Tensors of any shape, by slot: that of a pair twice.
        issued: Handles of the session, one for each.
        extents: Sizes of each buffer.
    """
    # Rows of no sequence lie behind the others, over what the storage has there.
    spare = [max(extent.rows - handle.shape[0], 0) for extent, handle in zip(extents, issued, strict=True)]
    room = [
        extent.capacity + more * handle.shape[3]
        for extent, more, handle in zip(extents, spare, issued, strict=True)
    ]
    session = registry.find(issued[0])
    assert session is not None
    session.forms = [extent.form for extent in extents]
    with bare():
        whole = handles.resize(issued, room)
    slot = 0
    while slot < len(buffers):
        buffer, extent, count = buffers[slot], extents[slot], num_sides(extents[slot].form)
        with _mode_of(buffer):
            looks = [handle.narrow(2, 0, extent.capacity) for handle in whole[slot : slot + count]]
            shape, stride = layout_in(looks, extent.form)
            shape[dims_of(extent.form).index(("batch",))] += spare[slot]
            buffer.set_(looks[0].untyped_storage(), looks[0].storage_offset(), shape, stride)
        held = mark(buffer, issued[slot].lease)  # type: ignore[attr-defined]
        held.version = _version(buffer)
        slot += count


def are_held(buffers: Sequence[torch.Tensor], issued: Sequence[torch.Tensor]) -> bool:
    """Whether buffers are handles of the session that has issued these already."""
    return buffers[0].untyped_storage()._cdata == issued[0].untyped_storage()._cdata


def tokens(
    buffer: torch.Tensor,
    count: int,
    form: str,
    num_kv_heads: int,
    *,
    side: int,
    batch: int,
    window: int | None,
) -> torch.Tensor:
    """The tokens of a buffer, heads first: of a handle a handle, of another tensor its numbers.

    Args:
        buffer: See `hold`.
        count: Tokens of the cache.
        form: The buffer's.
        num_kv_heads: KV heads.
        side: Of a pair: 0 for keys, 1 for values.
        batch: Sequences of the cache: the first rows of the buffer.
        window: Tokens that the buffer has room for, where it keeps the newest of them.

    Raises:
        CacheHandleError: If somebody wrote into a buffer that is a handle.
    """
    first = 0
    if window is not None and count >= window:
        first, count = 1, window - 1
    with bare():
        is_handle = isinstance(buffer, Handle)
        if is_handle and not are_intact([buffer]):
            raise CacheHandleError(_WRITTEN)
        sides = sides_of(plain(buffer), form, num_kv_heads, is_handle=is_handle)
        look = sides[side if len(sides) > 1 else 0]
        if not isinstance(buffer, Handle):
            return look[:batch].narrow(2, first, count)
        shape = (min(look.shape[0], batch), look.shape[1], count, look.shape[3])  # a copy may have fewer rows
        alone = torch.empty(0, dtype=buffer.dtype, device=buffer.device)  # no view, see `handle.py`
        alone.set_(look.untyped_storage(), look.storage_offset(), shape, look.stride())
        return mark(alone, buffer.lease)


def are_intact(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether nobody wrote into buffers since they became handles."""
    with bare():
        return all(getattr(buffer, "version", None) in (None, _version(buffer)) for buffer in buffers)


def free(buffers: Sequence[torch.Tensor]) -> list[torch.Size]:
    """Give the memory of buffers back, or the session that they hold. Returns their shapes, for `refill`."""
    shapes = [buffer.shape for buffer in buffers]
    for buffer in buffers:
        with _mode_of(buffer):
            nothing = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
            buffer.set_(nothing.untyped_storage(), 0, (0,), (1,))
        if isinstance(buffer, Handle):
            unmark(buffer)
        vars(buffer).pop(_LOST, None)
    registry.sweep()
    return shapes


def lose(buffers: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> None:
    """Make freed buffers zeros of their shapes: the call that was to fill them failed, see `are_lost`."""
    refill(buffers, [buffers[0].new_zeros(shape) for shape in shapes])
    for buffer in buffers:
        setattr(buffer, _LOST, _version(buffer))


def are_lost(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether the last call that was to fill buffers failed, and nobody has written into one since."""
    return any(getattr(buffer, _LOST, -1) == _version(buffer) for buffer in buffers)


def refill(buffers: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor]) -> None:
    """Make buffers plain tensors of these numbers."""
    for buffer, value in zip(buffers, numbers, strict=True):
        with _mode_of(buffer):
            buffer.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        if isinstance(buffer, Handle):
            unmark(buffer)


def restore(tensors: Sequence[object]) -> None:
    """Turn buffers that are handles back into the model's numbers, for a graph that reads them itself.

    Args:
        tensors: Inputs of a call, such buffers among them.
    """
    by_session: dict[int, list[Handle]] = {}
    for tensor in tensors:
        if isinstance(tensor, Handle) and hasattr(tensor, "version"):
            session = registry.find(tensor)
            if session is None:
                raise CacheHandleError(ELSEWHERE)
            by_session.setdefault(session.number, []).append(tensor)
    for held in by_session.values():
        _restore(held)


def restore_others(buffers: Sequence[torch.Tensor], count: int) -> None:
    """Restore a session's buffers where a graph has only part of them, or part of them holds numbers again.

    Args:
        buffers: The graph's, pairs once.
        count: Number of keys and values in them.
    """
    held = [buffer for buffer in buffers if isinstance(buffer, Handle)]
    session = registry.find(held[0]) if held else None
    if session is not None and not (len(held) == len(buffers) and count == 2 * len(session.shapes)):
        restore(held)


def _restore(held: Sequence[Handle]) -> None:
    session = registry.find(held[0])
    assert session is not None
    with bare():
        slots = [code.slot for code in map(handles.first_code, held) if code is not None]
    if len(slots) < len(held):
        raise CacheHandleError(_WRITTEN)
    forms = [(session.forms[slot], session.shapes[slot // 2].num_kv_heads) for slot in slots]
    batch = _rows_held(held[0], *forms[0], session.batch or 1)
    looks = {
        slot + side: tokens(
            buffer,
            session.kv_len,
            *form,
            side=side,
            batch=batch,
            window=session.shapes[slot // 2].window,
        )
        for buffer, form, slot in zip(held, forms, slots, strict=True)
        for side in range(num_sides(form[0]))
    }
    order = sorted(looks)
    with bare():
        numbers = dict(zip(order, numbers_of(order, [looks[slot] for slot in order]), strict=True))
    whole = []
    for buffer, form, slot in zip(held, forms, slots, strict=True):
        with bare():
            full = torch.zeros(buffer.shape, dtype=buffer.dtype, device=buffer.device)
        # The oldest row of a full window is not kept: the next token pushes it out before anything reads it.
        first = int(session.kv_len >= (session.shapes[slot // 2].window or session.kv_len + 1))
        for side, look in enumerate(sides_of(full, *form, is_handle=False)):
            count = looks[slot + side].shape[2]
            look[:batch].narrow(2, first, count).copy_(numbers[slot + side])
        whole.append(full)
    refill(held, whole)


def _rows_held(buffer: torch.Tensor, form: str, num_kv_heads: int, batch: int) -> int:
    """Rows of a buffer that stand for sequences: the session's, or of a copy those that name one slot."""
    with bare():
        if is_laid_out(buffer):
            return batch
        rows = sides_of(plain(buffer), form, num_kv_heads, is_handle=True)[0].split(1)
        slots = [code[0].slot if code else None for code in map(handles.decode, rows)]
    return next((row for row, slot in enumerate(slots) if slot != slots[0]), len(slots))


def _version(buffer: torch.Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version

"""The runner of a model that writes its caches into buffers of fixed length (`capture/caches/fixed_caches.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from specache_fx.capture.caches.buffers import Buffer, FixedCaches
from specache_fx.capture.caches.cache_records import Tokens
from specache_fx.errors import CacheHandleError
from specache_fx.lowering import Compiled
from specache_fx.runners.base import inference
from specache_fx.runtime.handles.handle_form import dims_of, is_laid_out
from specache_fx.runtime.handles.handle_tensor import Handle
from specache_fx.runtime.session import fixed_buffers, registry
from specache_fx.runtime.session.session import Session

HOST = "cpu"
"""The device whose positions are read in every step. On others the host would wait for them."""
Growing = tuple[Compiled, FixedCaches | None]
"""The graph's runner, and the handling of its buffers; None where it is left alone."""


class _Call(NamedTuple):
    """Where a call stands.

    Attributes:
        start: The row of its first token.
        q_len: Its tokens.
        batch: Its sequences.
        rooms: Tokens that each buffer has room for.
        counted: The next values of counters.
        agrees: On a device the host doesn't read: whether all that is so, `[]`.
    """

    start: int
    q_len: int
    batch: int
    rooms: Sequence[int]
    counted: Sequence[Any]
    agrees: torch.Tensor | None


class FixedCacheRunner:
    """Runs a prompt or later tokens; the model's buffers are handles of the session from then on.

    Args:
        make: Makes the runner of calls with a past, or of those without.
        has_past: Of which there is one already.
        first: That one.
    """

    def __init__(self, make: Callable[[bool], Growing], has_past: bool, first: Growing) -> None:
        self._make = make
        self._made: dict[bool, Growing] = {has_past: first}
        assert first[1] is not None
        self._plan = first[1]

    @property
    def runner(self) -> Compiled:
        """The runner of calls with a past; of a first call where there was none."""
        return (self._made.get(True) or self._made[False])[0]

    def __call__(self, *args: Any) -> Any:
        """Run the call's tokens.

        On a device the host doesn't read where a single token is written: outputs are NaN where it is not behind the
        tokens that are there.

        Raises:
            CacheHandleError: If tokens are written elsewhere than behind the tokens that are there, or earlier, or the
                buffers are not those of one session.
        """
        given = _buffers(self._plan, args)
        with inference():
            call = _located(self._plan, given, args)
        has_past = call.start > 0
        if has_past not in self._made:
            self._made[has_past] = self._make(has_past)
        runner, plan = self._made[has_past]
        if plan is None:
            return runner(*args)
        kv_len = call.start + call.q_len
        with inference():
            if call.agrees is None and any(map(bool, plan.shown(args, torch.tensor(kv_len)))):
                raise CacheHandleError(_SHOWN.format(kv_len=kv_len))
        with inference():
            if has_past:
                fixed_buffers.restore_others(given, len(plan.buffers))
            inputs = _inputs(plan, call, args)
            # Before a prompt's buffers are freed. Those of later calls nearly always hold the session already.
            extents = None if has_past else _extents(plan, call, args)
            shapes = None if has_past else fixed_buffers.free(given)
        try:
            results = runner(*inputs)
        except BaseException:
            if shapes is not None:
                with inference():
                    fixed_buffers.lose(given, shapes)
            raise
        with inference():
            outs = _finish(plan, call, args, results, extents)
            return outs if call.agrees is None else tuple(_or_nan(out, call.agrees) for out in outs)


def _located(plan: FixedCaches, held: Sequence[torch.Tensor], args: Sequence[Any]) -> _Call:
    """Where a call stands, which has to be behind the tokens of its buffers, or among them."""
    q_len, batch, rooms, positions, ends, holds, counted = plan.numbers(args)
    session, agrees = registry.find(held[0]) if held else None, None
    waits = session is not None and q_len == 1 and session.device.type != HOST
    if session is not None and waits and fixed_buffers.are_intact(held):
        start = session.kv_len
        shown = plan.shown(args, torch.tensor(start + q_len))
        rows = (torch.as_tensor(each, device=session.device) == start for each in positions)
        true = (torch.as_tensor(each, device=session.device) for each in (*holds, *(~each for each in shown)))
        agrees = torch.stack([each.all() for each in (*rows, *true)]).all()
    else:
        start = _start(positions, q_len)
        for message, each in zip(plan.asserts, holds, strict=True):
            if not each:
                raise AssertionError(message)
        if session is None and start and fixed_buffers.are_lost(held):
            raise CacheHandleError(_LOST.format(start=start))
    _check(plan, session, start, q_len, batch, is_held=bool(held) and is_laid_out(held[0]))
    kv_len = start + q_len
    for end, is_exact in zip(ends, plan.ends, strict=True):
        if end < kv_len or (is_exact and end > kv_len):
            raise CacheHandleError(
                (_READS_LESS if end < kv_len else _READS_MORE).format(end=end, kv_len=kv_len)
            )
    room = min(each for each, buffer in zip(rooms, plan.buffers, strict=True) if buffer.before is Tokens.ANY)
    if kv_len > room:
        raise CacheHandleError(_FULL.format(kv_len=kv_len, capacity=room))
    return _Call(start, q_len, batch, rooms, counted, agrees)


def _check(
    plan: FixedCaches, session: Session | None, start: int, q_len: int, batch: int, *, is_held: bool
) -> None:
    """Make sure that a call goes on with the tokens of its buffers."""
    held = start if session is None else session.kv_len
    if start > held:
        raise CacheHandleError(_GAP.format(start=start, kv_len=held))
    if session is not None and start and batch != session.batch and is_held:
        raise CacheHandleError(_OTHER_BATCH.format(batch=batch, held=session.batch))
    for (
        buffer
    ) in plan.buffers:  # one that keeps the newest tokens is written as if it held those before `start`
        is_full = start == held and start >= (buffer.window or 0)
        if (buffer.before is Tokens.FULL and not is_full) or (buffer.before is Tokens.NONE and start):
            raise CacheHandleError(_WINDOW.format(start=start, before=buffer.before.value, kv_len=held))


def _inputs(plan: FixedCaches, call: _Call, args: Sequence[Any]) -> list[Any]:
    """The graph's inputs: tokens in place of buffers, and masks of these."""
    added = [buffer for buffer in plan.buffers if buffer.input is not None and buffer.input >= len(args)]
    inputs = [*args, *(None for _ in added)]
    for slot, buffer in enumerate(plan.buffers if call.start else ()):
        assert buffer.place is not None and buffer.input is not None
        inputs[buffer.input] = fixed_buffers.tokens(
            args[buffer.place],
            call.start,
            buffer.form,
            buffer.num_kv_heads,
            side=slot % 2,
            batch=call.batch,
            window=buffer.window,
        )
    for place in plan.masks:
        inputs[place] = args[place].narrow(-1, 0, call.start + call.q_len)
    return inputs


def _finish(
    plan: FixedCaches,
    call: _Call,
    args: Sequence[Any],
    results: Sequence[Any],
    extents: Sequence[fixed_buffers.Extent] | None,
) -> tuple[Any, ...]:
    """Dynamo's outputs. The buffers hold the session, and counters are moved."""
    count = len(results) - len(plan.buffers)
    outs, issued = list(results[:count]), results[count:]
    buffers = [
        torch.empty(0, dtype=handle.dtype, device=handle.device)
        if buffer.place is None
        else args[buffer.place]
        for buffer, handle in zip(plan.buffers, issued, strict=True)
    ]
    if not fixed_buffers.are_held(buffers, issued):
        fixed_buffers.hold(buffers, issued, extents or _extents(plan, call, args))
    for buffer, tensor in zip(plan.buffers, buffers, strict=True):
        for i in buffer.outputs:
            outs[i] = tensor
    for place, value in zip(plan.counters, call.counted, strict=True):
        with torch.inference_mode(args[place].is_inference()):
            args[place].copy_(value)
    return tuple(outs)


def _buffers(plan: FixedCaches, args: Sequence[Any]) -> list[torch.Tensor]:
    """The buffers that come in, pairs once."""
    return [
        args[place] for place in dict.fromkeys(buffer.place for buffer in plan.buffers) if place is not None
    ]


def _extents(plan: FixedCaches, call: _Call, args: Sequence[Any]) -> list[fixed_buffers.Extent]:
    """The sizes of a plan's buffers in a call."""

    def rows(buffer: Buffer) -> int:
        dim = dims_of(buffer.form).index(("batch",))
        return 0 if buffer.place is None else int(args[buffer.place].shape[dim])

    return [
        fixed_buffers.Extent(room, rows(buffer), buffer.form)
        for room, buffer in zip(call.rooms, plan.buffers, strict=True)
    ]


def _start(positions: Sequence[Any], q_len: int) -> int:
    """The row of the first token, the same in all buffers."""
    starts = set()
    for position in positions:
        rows = torch.as_tensor(position).reshape(-1)
        first = int(rows[0])
        starts.add(first)
        wanted = torch.arange(first, first + q_len, device=rows.device)
        if len(rows) > 1 and not torch.equal(rows.to(wanted.dtype), wanted):
            raise CacheHandleError(_ORDER.format(positions=rows.tolist()))
    if len(starts) > 1:
        raise CacheHandleError(_SEVERAL.format(starts=sorted(starts)))
    (start,) = starts
    if start < 0:
        raise CacheHandleError(f"A token is written at position {start}, counted from the end. {_PROMPT}")
    return start


def _or_nan(out: Any, agrees: torch.Tensor) -> Any:
    is_float = isinstance(out, torch.Tensor) and out.is_floating_point() and not isinstance(out, Handle)
    return torch.where(agrees, out, torch.nan) if is_float else out


_PROMPT = "A prompt is written at position 0, and each call behind the one before."
_ORDER = f"The tokens of one call are written at positions {{positions}}, not one after the other. {_PROMPT}"
_SEVERAL = f"The layers of a model write one call's tokens at different positions {{starts}}. {_PROMPT}"
_GAP = (
    "Tokens are written at position {start} of a cache that holds {kv_len}: the tokens between were never written."
    f" {_PROMPT}"
)
_LOST = (
    "A token is written at position {start} of a cache of fixed length whose prompt failed midway: the tokens before"
    f" are gone. {_PROMPT}"
)
_OTHER_BATCH = (
    "A call of {batch} sequences goes on with a cache of fixed length that holds {held} sequences. Give each call as"
    f" many sequences as the prompt. {_PROMPT}"
)
_WINDOW = (
    "A layer with a sliding window writes into its buffer as if that held {before} tokens. Others write at position"
    " {start} of a cache that holds {kv_len}: a window can't go back. Call reset() on the whole cache, and start from"
    " the prompt."
)
_FULL = (
    "A cache of fixed length has room for {capacity} tokens, and this call would make them {kv_len}. Make a longer one"
    " (max_cache_len, max_seq_length)."
)
_READS_MORE = (
    "An attention without a mask reads the first {end} rows of a cache that holds {kv_len} tokens with this call's."
    " Rows behind them hold no tokens, or some that were left. Let it read as many as there are, or give it a mask."
)
_SHOWN = (
    "An attention's mask shows rows of a cache behind the {kv_len} tokens that it holds with this call's: rows that"
    " were never written, or tokens that this call went back before. Hide them in the mask, or compile this model with"
    ' backend="inductor".'
)
_READS_LESS = (
    "An attention reads {end} tokens, and the cache holds {kv_len} with this call's. Let it read as many as there are,"
    " and hide tokens with a mask. A prompt that attends to its own tokens alone is written at position 0, in one call."
)

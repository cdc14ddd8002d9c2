"""The runner of a model that writes its caches into buffers of fixed length (`capture/caches/fixed_caches.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specache_fx.capture.caches.buffers import Buffer, FixedCaches, size_in
from specache_fx.capture.caches.cache_records import Tokens
from specache_fx.errors import CacheHandleError
from specache_fx.lowering import Compiled
from specache_fx.runners.base import inference
from specache_fx.runtime import fixed_buffers, registry
from specache_fx.runtime.handle_form import dims_of, is_laid_out
from specache_fx.runtime.handle_tensor import Handle
from specache_fx.runtime.session import Session

HOST = "cpu"
"""The device whose positions are read in every step. On others the host would wait for them."""
Growing = tuple[Compiled, FixedCaches | None]
"""The graph's runner, and the handling of its buffers; None where it is left alone."""


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
        with inference():
            start, q_len, agrees = self._locate_tokens(args)
        runner, plan = self._runner(start > 0)
        if plan is None:
            return runner(*args)
        # A prompt's buffers are freed before it runs.
        extents = None if start else _extents(plan, args)
        agrees = self._masks_agree(plan, args, start + q_len, agrees)
        given = _buffers(plan, args)
        with inference():
            if start:
                fixed_buffers.restore_others(given, len(plan.buffers))
            inputs = self._inputs(plan, args, start, q_len)
            shapes = fixed_buffers.free(given) if not start else None
        try:
            results = runner(*inputs)
        except BaseException:
            if shapes is not None:
                with inference():
                    fixed_buffers.lose(given, shapes)
            raise
        with inference():
            outs = self._finish(plan, args, results, extents)
            return outs if agrees is None else tuple(_or_nan(out, agrees) for out in outs)

    @staticmethod
    def _masks_agree(
        plan: FixedCaches, args: Sequence[Any], kv_len: int, agrees: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Make sure that masks hide all rows behind the tokens; on a device `agrees` tells that too."""
        with inference():
            shown = list(plan.shown(args, torch.tensor(kv_len)))
            if agrees is not None:
                return (
                    agrees & ~torch.stack([each.to(agrees.device) for each in shown]).any()
                    if shown
                    else agrees
                )
            if any(bool(each) for each in shown):
                raise CacheHandleError(_SHOWN.format(kv_len=kv_len))
            return None

    def _runner(self, has_past: bool) -> Growing:
        if has_past not in self._made:
            self._made[has_past] = self._make(has_past)
        return self._made[has_past]

    def _locate_tokens(self, args: Sequence[Any]) -> tuple[int, int, torch.Tensor | None]:
        """The row of this call's first token, the number of tokens, and on a device whether that is so."""
        plan = self._plan
        q_len = size_in(plan.q_len, args)
        values = list(plan.positions(args))
        first_assert = len(values) - len(plan.asserts)
        first_end = first_assert - len(plan.ends)
        positions = [*(args[i] for i in plan.starts), *values[:first_end]]
        written = [buffer for buffer in plan.buffers if buffer.before is Tokens.ANY]
        capacity = min(size_in(buffer.capacity, args) for buffer in written)
        held = _buffers(plan, args)
        session = registry.find(held[0]) if held else None
        agrees = None
        if (
            session is not None
            and q_len == 1
            and session.device.type != HOST
            and fixed_buffers.are_intact(held)
        ):
            asserted = (torch.as_tensor(one, device=session.device).all() for one in values[first_assert:])
            start, agrees = (
                session.kv_len,
                torch.stack([*(_at(one, session) for one in positions), *asserted]).all(),
            )
        else:
            start = _start(positions, q_len)
            for message, holds in zip(plan.asserts, values[first_assert:], strict=True):
                if not holds:
                    raise AssertionError(message)
            if session is not None and start > session.kv_len:
                raise CacheHandleError(_GAP.format(start=start, kv_len=session.kv_len))
            if session is None and start and fixed_buffers.are_lost(held):
                raise CacheHandleError(_LOST.format(start=start))
        batch = size_in(plan.batch, args)
        if session is not None and start and batch != session.batch and is_laid_out(held[0]):
            raise CacheHandleError(_OTHER_BATCH.format(batch=batch, held=session.batch))
        kv_len = start if session is None else session.kv_len
        for buffer in plan.buffers:
            _check_window(buffer, start, kv_len)
        for end, is_exact in zip(values[first_end:first_assert], plan.ends, strict=True):
            if end < start + q_len:
                raise CacheHandleError(_READS_LESS.format(end=end, kv_len=start + q_len))
            if is_exact and end > start + q_len:
                raise CacheHandleError(_READS_MORE.format(end=end, kv_len=start + q_len))
        if start + q_len > capacity:
            raise CacheHandleError(_FULL.format(kv_len=start + q_len, capacity=capacity))
        return start, q_len, agrees

    def _inputs(self, plan: FixedCaches, args: Sequence[Any], start: int, q_len: int) -> list[Any]:
        inputs = [
            *args,
            *(None for buffer in plan.buffers if buffer.input is not None and buffer.input >= len(args)),
        ]
        for slot, buffer in enumerate(plan.buffers if start else ()):
            assert buffer.place is not None and buffer.input is not None
            inputs[buffer.input] = fixed_buffers.tokens(
                args[buffer.place],
                start,
                buffer.form,
                buffer.num_kv_heads,
                side=slot % 2,
                batch=size_in(plan.batch, args),
                window=buffer.window,
            )
        for place in plan.masks:
            inputs[place] = args[place].narrow(-1, 0, start + q_len)
        return inputs

    @staticmethod
    def _finish(
        plan: FixedCaches,
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
            fixed_buffers.hold(buffers, issued, extents or _extents(plan, args))
        for buffer, tensor in zip(plan.buffers, buffers, strict=True):
            for i in buffer.outputs:
                outs[i] = tensor
        for place, value in zip(plan.counters, plan.counted(args), strict=True):
            with torch.inference_mode(args[place].is_inference()):
                args[place].copy_(value)
        return tuple(outs)


def _buffers(plan: FixedCaches, args: Sequence[Any]) -> list[torch.Tensor]:
    """The buffers that come in, pairs once."""
    return [
        args[place] for place in dict.fromkeys(buffer.place for buffer in plan.buffers) if place is not None
    ]


def _extents(plan: FixedCaches, args: Sequence[Any]) -> list[fixed_buffers.Extent]:
    """The sizes of a plan's buffers in a call."""

    def rows(buffer: Buffer) -> int:
        dim = dims_of(buffer.form).index(("batch",))
        return 0 if buffer.place is None else int(args[buffer.place].shape[dim])

    return [
        fixed_buffers.Extent(size_in(buffer.capacity, args), rows(buffer), buffer.form)
        for buffer in plan.buffers
    ]


def _check_window(buffer: Buffer, start: int, kv_len: int) -> None:
    """Make sure that a buffer that keeps the newest tokens is written as one that holds those before `start`."""
    full = buffer.before is Tokens.FULL
    if (full and (start != kv_len or start < (buffer.window or 0))) or (
        buffer.before is Tokens.NONE and start
    ):
        raise CacheHandleError(_WINDOW.format(start=start, before=buffer.before.value, kv_len=kv_len))


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


def _at(position: Any, session: Session) -> torch.Tensor:
    """Whether a token is written behind those that a session has, on its device: `[]`."""
    written = torch.as_tensor(position, device=session.device).reshape(-1)
    return (written == session.kv_len).all()


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

"""Which session a tensor belongs to: by storage identity, else by what its NaN-boxed rows say.

The registry holds sessions by the storage of their handles, weakly: once the last handle is gone, so is the session,
at the next forward pass (a cache that is reordered or copied drops all its old handles before it uses the new ones).
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError
from specache_fx.runtime import handle as handles
from specache_fx.runtime.session import LayerShape, Session

P = ParamSpec("P")
R = TypeVar("R")

_MIXED = (
    "The past KV tensors of this call come from several caches, or in another order than the model returned them, or"
    " their oldest tokens were cut off. Pass the cache of one call back as it was: only its newest tokens can be cut"
    " off (crop)."
)
_REORDERED = (
    "Copy batch rows with index_select (Cache.reorder_cache, batch_select_indices, batch_repeat_interleave) or deepcopy"
    " the cache, at the length that it has."
)
_ENDED = (
    "The past KV cache belongs to a session that has ended: all tensors of the cache that it is a copy of were dropped,"
    " and a model was called since. Keep the original until the copy is used, or start from the prompt."
)
_LEFT = (
    "The past KV cache belongs to a branch that was left: the same cache went on from an earlier token since. Keep the"
    " cache that the model returned last, or start from the prompt."
)
_ELSEWHERE = (
    "The past KV cache was made in another process: what it stands for is not in this one. A cache of specache can't be"
    " saved and loaded; start from the prompt."
)


@dataclass
class _Issue:
    """One set of handles. It is remembered as long as its session, since copies of it may outlive it.

    Attributes:
        session: Whose.
        storage: Dies with the last of them.
        valid_len: Tokens up to which they tell the session's history: fewer than they had once the session was rolled
            back and went on otherwise. None for the newest set.
        moved: Rows that a copy had when the session's rows were put into that order: the copy may come again, if the
            step that it came for failed. Other copies of the set are void.
    """

    session: Session
    storage: StorageWeakRef
    valid_len: int | None = None
    moved: list[int] | None = None


_codes = itertools.count(1)
_issues: dict[int, _Issue] = {}  # by the code that the handles carry
_by_storage: dict[int, _Issue] = {}  # those whose handles live
_open: WeakValueDictionary[int, Session] = WeakValueDictionary()  # also those in their first prefill
_lock = threading.RLock()  # generations may run in threads, each with a cache of its own
_PATIENCE_S = 60.0  # how long a cache that another thread ran may be nothing but copies


def _locked(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return function(*args, **kwargs)

    return locked


@_locked
def open_session(
    config: SpecacheConfig, shapes: tuple[LayerShape, ...], dtype: torch.dtype, device: torch.device
) -> Session:
    """Make a session for a prefill that is about to run; it lasts once `issue` has made its handles."""
    session = Session(config, shapes, dtype, device)
    _touch(session)
    _open[session.number] = session
    return session


def by_state(state: torch.Tensor) -> Session:
    """The session that an op's `state` names."""
    return _open[int(state)]


def _touch(session: Session) -> None:
    session.thread, session.used_at = threading.get_ident(), time.monotonic()


@_locked
def issue(session: Session) -> list[torch.Tensor]:
    """Make handles for a session, keys and values in turn, layer by layer, and remember whose they are."""
    assert session.batch is not None
    slots = [
        (shape.num_kv_heads, dim) for shape in session.shapes for dim in (shape.key_dim, shape.value_dim)
    ]
    code = next(_codes) % handles.MAX_SESSION
    made = handles.issue(code, slots, session.batch, session.kv_len, session.dtype, session.device)
    made = resized(session, made)
    storage = StorageWeakRef(made[0].untyped_storage())
    _issues[code] = _by_storage[storage.cdata] = _Issue(session, storage)
    return made


def resized(session: Session, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A session's handles at its present length; each call gets them from here."""
    lengths = session.handle_lengths()
    newest = [handles.resize(tensor, length) for tensor, length in zip(made, lengths, strict=True)]
    session.newest = weakref.ref(newest[0])
    return newest


@_locked
def sweep() -> None:
    """Free the sessions whose last handle is gone.

    Those that another thread ran last only after a while: it may be reordering its cache just now.
    """
    recent = time.monotonic() - _PATIENCE_S
    for key in [key for key, issued in _by_storage.items() if issued.storage.expired()]:
        session = _by_storage[key].session
        if session.thread != threading.get_ident() and session.used_at > recent:
            continue
        del _by_storage[key]
        if any(issued.session is session for issued in _by_storage.values()):
            continue
        session.close()
        for code in [code for code, issued in _issues.items() if issued.session is session]:
            del _issues[code]


@_locked
def find(tensor: torch.Tensor) -> Session | None:
    """The live session of a handle, or None (`stats()`)."""
    issued = _issue_of(tensor)
    return None if issued is None else issued.session


def _issue_of(tensor: torch.Tensor) -> _Issue | None:
    issued = _by_storage.get(tensor.untyped_storage()._cdata)
    return None if issued is None or issued.storage.expired() else issued


@_locked
def first_handle(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first of several floating-point 4-D tensors that is a handle, a copy of one, or a piece of one.

    Costs one read of the device, whatever their number: only what begins with NaN is looked at closely.
    """
    for tensor in tensors:
        if _issue_of(tensor) is not None:
            return tensor
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return None
    starts = torch.stack([tensor.detach()[0, 0, 0, 0].to(full[0].device, torch.float32) for tensor in full])
    for tensor, is_nan in zip(full, starts.isnan().tolist(), strict=True):
        if is_nan and handles.is_poisoned(tensor):
            return tensor
    return None


@dataclass(frozen=True)
class Claim:
    """What the past KV inputs of a call say.

    Attributes:
        issued: The set of handles that they are, or are copies of.
        kv_len: Tokens that the caller believes to be there.
        past: The inputs, where they are the session's own handles; None where they are copies.
        rows: Batch rows of the session, in the order of the inputs'.
    """

    issued: _Issue
    kv_len: int
    past: list[torch.Tensor] | None
    rows: list[int]

    @property
    def session(self) -> Session:
        """Whose they are."""
        return self.issued.session


@_locked
def go_on(
    past: Sequence[torch.Tensor], config: SpecacheConfig, shapes: tuple[LayerShape, ...]
) -> tuple[Session, list[torch.Tensor]]:
    """Give the session that the past KV inputs of a call belong to, at the length that the caller believes.

    The session's own handles, uncut, go on as they are. Cut: new ones; what else counted the tokens that are discarded
    is void from then on (another branch). Copies: the session itself with its batch rows reordered, where nobody holds
    the original any more (beam search), else a session of its own (a fork).

    Args:
        past: The inputs, keys and values in turn, layer by layer.
        config: What the graph was compiled with.
        shapes: The graph's layers.

    Returns:
        The session, and handles of it in the order of `past`.

    Raises:
        CacheHandleError: If they are no handles, are of several sessions or lengths, of a session that has ended, a
            branch that was left or another model, or were cut.
        HostMemoryError: If the host tier can't take a fork.
    """
    claim = _claim(past)
    session = claim.session
    if session.config != config or session.shapes != shapes:
        raise CacheHandleError(
            f"The past KV cache was made with {session.config} for {len(session.shapes)} layers; this graph was"
            f" compiled with {config} for {len(shapes)}. Use a cache with the compiled model that made it."
        )
    with session.lock:  # a step of the original may be under way in another thread
        return _take(claim)


def _claim(past: Sequence[torch.Tensor]) -> Claim:
    issued = _issue_of(past[0])
    claim = _recognise(past) if issued is None else _own(issued, past)
    valid_len = claim.issued.valid_len
    if valid_len is not None and claim.kv_len > valid_len:
        raise CacheHandleError(_LEFT)
    return claim


def _claimed_length(session: Session, past: Sequence[torch.Tensor]) -> int:
    """Tokens that the caller believes to be there, by the lengths of the handles.

    A layer that keeps a window tells it until that is full. Where no layer tells more, only the handles that the last
    call returned are known to be up to date.

    Raises:
        CacheHandleError: If the layers disagree, or it can't be told.
    """
    kv_len = told_length(session.shapes, past)
    if kv_len is None:
        newest = session.newest() if session.newest is not None else None
        if past[0] is not newest and session.kv_len != max(tensor.shape[2] for tensor in past):
            raise CacheHandleError(
                "How many tokens this past KV cache holds can't be told: each of its layers keeps a window, all of them"
                " are full, and it is not the one that the model returned last (a copy, or an earlier one). Go on from"
                " the newest cache, or start from the prompt."
            )
        return session.kv_len
    return kv_len


def told_length(shapes: Sequence[LayerShape], past: Sequence[torch.Tensor]) -> int | None:
    """Tokens that a cache holds, by the lengths of its tensors; None where all are windows that are full.

    Args:
        shapes: Of the layers.
        past: Keys and values in turn, layer by layer.

    Raises:
        CacheHandleError: If the layers disagree.
    """
    pairs = [shape for shape in shapes for _ in range(2)]
    lengths = [tensor.shape[2] for tensor in past]
    if len(lengths) != len(pairs):
        raise CacheHandleError(_MIXED)
    telling = [
        length
        for length, shape in zip(lengths, pairs, strict=True)
        if shape.window is None or length < shape.window - 1
    ]
    if not telling and all(
        length == shape.tokens(length) for length, shape in zip(lengths, pairs, strict=True)
    ):
        return None
    kv_len = max(telling, default=0)
    if lengths != [shape.tokens(kv_len) for shape in pairs]:
        raise CacheHandleError(
            f"The layers of the past KV cache have different lengths {sorted(set(lengths))}: crop all of them, or none."
        )
    return kv_len


def _own(issued: _Issue, past: Sequence[torch.Tensor]) -> Claim:
    batch = issued.session.batch or 0
    key, offset = past[0].untyped_storage()._cdata, 0
    for tensor in past:
        if tensor.untyped_storage()._cdata != key:
            raise CacheHandleError(_MIXED)
        if tensor.shape[0] != batch:
            raise CacheHandleError(
                f"The past KV cache was cut to {tensor.shape[0]} of its {batch} batch rows by slicing. {_REORDERED}"
            )
        if tensor.storage_offset() != offset:
            raise CacheHandleError(_MIXED)
        offset += tensor.shape[0] * tensor.shape[3]
    return Claim(issued, _claimed_length(issued.session, past), list(past), list(range(batch)))


def _recognise(past: Sequence[torch.Tensor]) -> Claim:
    """Read off copies of handles whose they are."""
    found: _Issue | None = None
    first: list[int] | None = None
    for slot, tensor in enumerate(past):
        codes = handles.decode(tensor)
        if codes is None:
            raise CacheHandleError(
                f"The past KV tensor of shape {tuple(tensor.shape)} is no cache of a model compiled with specache,"
                " though other layers' are, or the oldest tokens of a copy were cut off. Pass the cache of one call"
                " back as the model returned it."
            )
        if not codes[0].is_ours:
            raise CacheHandleError(_ELSEWHERE)
        issued = _issues.get(codes[0].session)
        if issued is None:
            raise CacheHandleError(_ENDED)
        rows = [code.row for code in codes]
        same = all(code.session == codes[0].session and code.slot == slot for code in codes)
        if not same or found not in (None, issued) or first not in (None, rows):
            raise CacheHandleError(_MIXED)
        found, first = issued, rows
    assert found is not None and first is not None
    session = found.session
    kv_len = _claimed_length(session, past)
    if found.moved is not None:
        if first != found.moved or kv_len != session.kv_len:
            raise CacheHandleError(_LEFT)
        first = list(range(session.batch or 0))
    if first != list(range(session.batch or 0)) and kv_len != session.kv_len:
        # Rows that were moved can't be told from tokens that were cut off, unless the length is whole.
        raise CacheHandleError(
            f"The past KV cache holds rows {first} of a session's {session.batch} at {kv_len} tokens, where the session"
            f" has {session.kv_len}. {_REORDERED}"
        )
    return Claim(found, kv_len, None, first)


def _take(claim: Claim) -> tuple[Session, list[torch.Tensor]]:
    session, rows = claim.session, claim.rows
    if claim.past is None:
        alone = not any(i.session is session and not i.storage.expired() for i in _by_storage.values())
        if not alone or len(rows) != session.batch:
            session = session.fork(rows)
            session.rewind(claim.kv_len)
            _touch(session)
            _open[session.number] = session
            return session, issue(session)
        if rows != list(range(len(rows))):
            _reorder(claim)
    _touch(session)
    discards = claim.kv_len < session.kv_len
    session.rewind(claim.kv_len)
    if claim.past is not None and not discards:
        return session, claim.past
    for issued in _issues.values():
        if issued.session is session and (discards or issued.valid_len is None):
            known = session.kv_len if issued.valid_len is None else issued.valid_len
            issued.valid_len = min(known, session.kv_len)
    return session, issue(session)


def _reorder(claim: Claim) -> None:
    session = claim.session
    for code in [code for code, issued in _issues.items() if issued.session is session]:
        if _issues[code] is not claim.issued:
            del _issues[code]  # their rows are others now
    try:
        session.reorder(claim.rows)
    except BaseException:
        # Some layers have moved and some have not.
        session.close()
        del _issues[next(code for code, issued in _issues.items() if issued is claim.issued)]
        raise
    claim.issued.moved = claim.rows

"""Which sessions there are, and whose a handle is.

The registry holds sessions by the storage of their handles, weakly: once the last handle is gone, so is the session,
at the next forward pass (a cache that is reordered or copied drops all its old handles before it uses the new ones).
"""

from __future__ import annotations

import functools
import itertools
import sys
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
from specache_fx.runtime import handle as handles
from specache_fx.runtime.session import LayerShape, Session

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Issue:
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
_issues: dict[int, Issue] = {}  # by the code that the handles carry
_by_storage: dict[int, Issue] = {}  # those whose handles live
_open: WeakValueDictionary[int, Session] = WeakValueDictionary()  # also those in their first prefill
_lock = threading.RLock()  # generations may run in threads, each with a cache of its own
_PATIENCE_S = 60.0  # how long a cache that another thread ran may be nothing but copies


def locked(function: Callable[P, R]) -> Callable[P, R]:
    """One thread at a time in all functions that are so marked."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return function(*args, **kwargs)

    return alone


@locked
def open_session(
    config: SpecacheConfig, shapes: tuple[LayerShape, ...], dtype: torch.dtype, device: torch.device
) -> Session:
    """Make a session for a prefill that is about to run; it lasts once `issue` has made its handles."""
    session = Session(config, shapes, dtype, device)
    touch(session)
    return session


def by_state(state: torch.Tensor) -> Session:
    """The session that an op's `state` names."""
    return _open[int(state)]


def touch(session: Session) -> None:
    """Note that this thread runs a session now; ops find it from then on."""
    session.thread, session.used_at = threading.get_ident(), time.monotonic()
    _open[session.number] = session


def by_code(code: int) -> Issue | None:
    """The set of handles that carries a code, living or not."""
    return _issues.get(code)


def issues_of(session: Session) -> list[Issue]:
    """All sets of handles of a session that are remembered, the oldest first."""
    return [issued for issued in _issues.values() if issued.session is session]


def forget(gone: Sequence[Issue]) -> None:
    """Copies of these sets stand for nothing any more."""
    for code in [code for code, issued in _issues.items() if any(issued is one for one in gone)]:
        del _issues[code]


def is_held(session: Session) -> bool:
    """Whether a handle of the session lives, as made (not a copy)."""
    return any(issued.session is session and not issued.storage.expired() for issued in _by_storage.values())


@locked
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
    _issues[code] = _by_storage[storage.cdata] = Issue(session, storage)
    return made


def resized(session: Session, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A session's handles at its present length; each call gets them from here."""
    lengths = session.handle_lengths()
    newest = [handles.resize(tensor, length) for tensor, length in zip(made, lengths, strict=True)]
    session.newest = weakref.ref(newest[0])
    return newest


@locked
def sweep() -> None:
    """Free the sessions whose last handle is gone.

    Those that another living thread ran last only after a while: it may be reordering its cache just now.
    """
    recent = time.monotonic() - _PATIENCE_S
    for key in [key for key, issued in _by_storage.items() if issued.storage.expired()]:
        session = _by_storage[key].session
        own = session.thread == threading.get_ident()
        if not own and session.used_at > recent and session.thread in sys._current_frames():
            continue
        del _by_storage[key]
        if any(issued.session is session for issued in _by_storage.values()):
            continue
        session.close()
        forget(issues_of(session))


@locked
def find(tensor: torch.Tensor) -> Session | None:
    """The live session of a handle, or None (`stats()`)."""
    issued = issue_of(tensor)
    return None if issued is None else issued.session


def issue_of(tensor: torch.Tensor) -> Issue | None:
    """The set of handles that a tensor is one of; None for copies, and for what is no handle."""
    issued = _by_storage.get(tensor.untyped_storage()._cdata)
    return None if issued is None or issued.storage.expired() else issued


@locked
def first_handle(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first of several floating-point 4-D tensors that is a handle, a copy of one, or a piece of one.

    Costs one read of the device, whatever their number: only what begins with NaN is looked at closely.
    """
    for tensor in tensors:
        if issue_of(tensor) is not None:
            return tensor
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return None
    # No three elements in a row are numbers, and a sum with NaN is NaN.
    starts = torch.stack(
        [tensor.detach()[0, 0, 0, :3].sum().to(full[0].device, torch.float32) for tensor in full]
    )
    for tensor, is_nan in zip(full, starts.isnan().tolist(), strict=True):
        if is_nan and handles.is_poisoned(tensor):
            return tensor
    return None

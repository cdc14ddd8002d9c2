"""The sessions that there are, and the owner of each handle.

A session ends with the last of its handles, their views and copies (`Lease`), wherever that is dropped. A cache that
is reordered drops all its old handles before it uses the new ones: these are copies, and keep the session.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.handles import handle as handles
from specache_fx.runtime.handles.handle_tensor import Handle, Lease, bare, mark
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.transfer import copies_here

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Issue:
    """One set of handles. It is remembered as long as its session, since copies of it may outlive it.

    Attributes:
        session: Whose.
        storage: Dies with the last of them.
        codes: `handles.codes_of` them as they were made; None on a device, where the host would have to wait for it.
        valid_len: Tokens up to which they tell the session's history: fewer than they had once the session was rolled
            back and went on otherwise. None for the newest set.
        moved: Rows that a copy had when the session's rows were put into that order: the copy may come again, if the
            step that it came for failed. Other copies of the set are void.
    """

    session: Session
    storage: StorageWeakRef
    codes: torch.Tensor | None
    valid_len: int | None = None
    moved: list[int] | None = None


_codes = itertools.count(1)
_issues: dict[int, Issue] = {}  # by the code that the handles carry
_by_storage: dict[int, Issue] = {}  # those whose handles live
_open: WeakValueDictionary[int, Session] = WeakValueDictionary()  # also those in their first prefill
_ended: deque[Session] = deque()  # whose last handle is gone, and which are still to be closed
_exits = threading.Event()
_LAST_CALL_S = 2  # that the process's exit waits for all calls
_lock = threading.RLock()  # generations may run in threads, each with a cache of its own


class _Busy(Exception):
    """Another thread holds a session."""

    def __init__(self, session: Session) -> None:
        self.session = session


def locked(function: Callable[P, R]) -> Callable[P, R]:
    """One thread at a time in all functions that are so marked; handles are plain tensors in there.

    A function that meets a session which another thread holds (`try_hold`) begins anew when that is free.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            try:
                with _lock, bare():
                    check_running()
                    return function(*args, **kwargs)
            except _Busy as busy:
                if _lock._is_owned():  # type: ignore[attr-defined]
                    raise  # the outermost function waits
                session = busy.session
            with session.lock:
                pass

    return alone


def check_running() -> None:
    """End this thread, a daemon, quietly if the process exits: see `_at_exit`."""
    if _exits.is_set() and threading.current_thread() is not threading.main_thread():
        raise SystemExit


@contextlib.contextmanager
def try_hold(session: Session) -> Iterator[None]:
    """Hold a session still, in a function that is `locked` and has changed nothing yet.

    A step may be under way in another thread, or a cache be written to a slow disk. All other sessions go on
    meanwhile: the registry is not held until that is through.
    """
    if not session.lock.acquire(blocking=False):
        raise _Busy(session)
    try:
        yield
    finally:
        session.lock.release()


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
    return _open[int(state[0])]


def touch(session: Session) -> None:
    """Have ops find a session from now on."""
    _open[session.number] = session


def by_code(code: int) -> Issue | None:
    """The set of handles that carries a code, living or not."""
    return _issues.get(code)


def issues_of(session: Session) -> list[Issue]:
    """All sets of handles of a session that are remembered, the oldest first."""
    return [issued for issued in _issues.values() if issued.session is session]


def forget(gone: Sequence[Issue]) -> None:
    """Forget these sets: their copies belong to no session any more."""
    for code in [code for code, issued in _issues.items() if any(issued is one for one in gone)]:
        del _issues[code]


def is_held(session: Session) -> bool:
    """Whether a handle of the session lives, as made (not a copy)."""
    return any(issued.session is session and not issued.storage.expired() for issued in _by_storage.values())


def has_copies(session: Session, past: Sequence[torch.Tensor], discards: bool) -> bool:
    """Whether copies of the session's handles live, other than a call's `past`, that hold what the call changes.

    Args:
        session: The session.
        past: Its handles, or copies of them.
        discards: The call changes tokens too that the session has had for long, not just its newest state.
    """
    lease = session.lease() if session.lease is not None else None
    if lease is None or not (copies := lease.copies()):
        return False
    given = {tensor.untyped_storage()._cdata for tensor in past}
    return any(key not in given and (discards or kv_len == session.kv_len) for key, kv_len in copies.items())


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
    storage, codes = StorageWeakRef(made[0].untyped_storage()), None
    if session.device.type == "cpu":
        codes = handles.codes_of(made[0], session.batch * sum(dim for _, dim in slots)).clone()
    _issues[code] = _by_storage[storage.cdata] = Issue(session, storage, codes)
    return made


def resized(session: Session, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A session's handles at its present length; each call gets them from here."""
    lease = _lease(session)
    with bare():
        newest: list[torch.Tensor] = [
            mark(handle, lease, session.kv_len) for handle in handles.resize(made, session.handle_lengths())
        ]
    session.newest = handles.Newest(list(map(weakref.ref, newest)), session.kv_len)
    return newest


def _lease(session: Session) -> Lease:
    """The lease: shared by all handles of a session, which ends with it."""
    lease = session.lease() if session.lease is not None else None
    if lease is None:
        lease = Lease(session)
        session.lease = weakref.ref(lease)
        weakref.finalize(lease, _end, session).atexit = False
    return lease


def _end(session: Session) -> None:
    """Free a session whose last handle is gone.

    Runs wherever that was dropped, in a garbage collection too. So it must not wait for a lock, nor for a copy that
    this thread makes, nor change the registry under a function of it that this thread is in, nor call operators under a
    mode that sees them: a trace would have them in its graph. In these cases the next forward pass frees the session.
    """
    if _open.get(session.number) is not session:  # the parent's: see `_in_child`
        return
    _ended.append(session)
    if copies_here() or _exits.is_set() or torch._C._len_torch_dispatch_stack():
        return
    if not _lock._is_owned() and _lock.acquire(blocking=False):  # type: ignore[attr-defined]
        try:
            with torch._C.DisableTorchFunction():
                sweep()
        finally:
            _lock.release()


@locked
def sweep() -> None:
    """Free the sessions whose last handle is gone and which are still there, and forget storages that are gone."""
    while _ended:
        session = _ended[0]
        session.close()
        forget(issues_of(session))
        _ended.popleft()  # now, so that the next sweep goes on where one is interrupted
    for key in [key for key, issued in _by_storage.items() if issued.storage.expired()]:
        del _by_storage[key]


@locked
def find(tensor: torch.Tensor) -> Session | None:
    """The session of a handle or a copy of one, which may be released; None for other tensors."""
    issued = issue_of(tensor)
    if issued is not None:
        return issued.session
    session = tensor.lease.session if isinstance(tensor, Handle) else None
    assert session is None or isinstance(session, Session)
    return None if session is None or _open.get(session.number) is not session else session


@locked
def release(session: Session, tensors: Sequence[torch.Tensor]) -> None:
    """Free a session of which `tensors` has handles or copies. For copies alone it stays while a handle of it lives."""
    originals = any(issued.session is session for issued in map(issue_of, tensors) if issued is not None)
    if originals or not is_held(session):
        with try_hold(session):
            session.close()


def issue_of(tensor: torch.Tensor) -> Issue | None:
    """The set of handles that a tensor is one of; None for copies and other tensors."""
    issued = _by_storage.get(tensor.untyped_storage()._cdata)
    return None if issued is None or issued.storage.expired() else issued


@locked
def first_handle(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first of several floating-point tensors, 3-D or 4-D, that is a handle, a copy of one, or a piece of one.

    Costs one read of the device, whatever their number: only what begins with NaN is looked at closely.
    """
    for tensor in tensors:
        if issue_of(tensor) is not None:
            return tensor
    full = [tensor for tensor in tensors if tensor.numel() and tensor.dtype in handles.DTYPES]
    if not full:
        return None
    # No three elements in a row are numbers, and a sum with NaN is NaN.
    starts = torch.stack(
        [handles.first_row(tensor)[:3].sum().to(full[0].device, torch.float32) for tensor in full]
    )
    for tensor, is_nan in zip(full, starts.isnan().tolist(), strict=True):
        if is_nan and handles.is_poisoned(tensor):
            return tensor
    return None


_of_parent: list[Session] = []


def _in_child() -> None:
    """Leave all sessions to the parent of a forked process, which shares their files and page-locked memory.

    Their handles carry the parent's number (`handle.py`), so each use of one is refused as another process's.
    """
    _lock._at_fork_reinit()  # type: ignore[attr-defined]  # another thread of the parent may have held it
    # To free the device's memory is not for a forked process.
    _of_parent.extend(session for session in _open.values() if session.device.type != "cpu")
    for known in (_issues, _by_storage, _open, _ended):
        known.clear()


os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    """Let the calls of daemon threads end, and none begin: torch takes its operators away next.

    No lock is kept: a handler that runs later may wait for such a thread.
    """
    _exits.set()
    end = time.monotonic() + _LAST_CALL_S
    for lock in (_lock, *(session.lock for session in list(_open.values()))):
        if lock.acquire(timeout=max(0, end - time.monotonic())):
            lock.release()


atexit.register(_at_exit)

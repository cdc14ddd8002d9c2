"""Which session a tensor belongs to: by storage identity, else by what its NaN-boxed rows say.

The registry holds sessions by the storage of their handles, weakly: once the last handle is gone, so is the session,
at the next forward pass (a cache that is reordered or copied drops all its old handles before it uses the new ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError
from specache_fx.runtime import handle as handles
from specache_fx.runtime.session import LayerShape, Session

_NOT_YET = (
    "Beam search, num_return_sequences with beams and copies of a cache are not supported yet: use greedy search or"
    " sampling, or run this call on a model that is not compiled with specache."
)


@dataclass
class _Entry:
    session: Session
    storage: StorageWeakRef


_entries: dict[int, _Entry] = {}  # by session number: the sessions that have handles
_open: WeakValueDictionary[int, Session] = WeakValueDictionary()  # those, and the ones in their first prefill


def open_session(
    config: SpecacheConfig, shapes: tuple[LayerShape, ...], dtype: torch.dtype, device: torch.device
) -> Session:
    """Make a session for a prefill that is about to run; it lasts once `issue` has made its handles."""
    session = Session(config, shapes, dtype, device)
    _open[session.number] = session
    return session


def by_state(state: torch.Tensor) -> Session:
    """The session that an op's `state` names."""
    return _open[int(state)]


def issue(session: Session) -> list[torch.Tensor]:
    """Make the session's handles, keys and values in turn, layer by layer, and remember whose they are."""
    assert session.batch is not None
    slots = [
        (shape.num_kv_heads, dim) for shape in session.shapes for dim in (shape.key_dim, shape.value_dim)
    ]
    made = handles.issue(session.number, slots, session.batch, session.kv_len, session.dtype, session.device)
    _entries[session.number] = _Entry(session, StorageWeakRef(made[0].untyped_storage()))
    return [handles.resize(handle, session.kv_len) for handle in made]


def sweep() -> None:
    """Free the sessions whose last handle is gone."""
    for number in [number for number, entry in _entries.items() if entry.storage.expired()]:
        _entries.pop(number).session.close()


def find(tensor: torch.Tensor) -> Session | None:
    """The live session of a handle, or None (the fast path of `resolve`, and `stats()`)."""
    key = tensor.untyped_storage()._cdata
    for entry in _entries.values():
        if entry.storage.cdata == key and not entry.storage.expired():
            return entry.session
    return None


def is_handle(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a handle or a copy of one."""
    return find(tensor) is not None or handles.decode(tensor) is not None


def resolve(past: Sequence[torch.Tensor]) -> tuple[Session, list[torch.Tensor]]:
    """Find the session that the past KV inputs of one graph belong to.

    Args:
        past: The inputs, keys and values in turn, layer by layer.

    Returns:
        The session, and handles in its storage. Their length is what the caller believes: `Session.rewind` to it.

    Raises:
        CacheHandleError: If they are no handles, are of several sessions or lengths, of a session that has ended, or
            were permuted, repeated or forked.
    """
    lengths = {tensor.shape[2] for tensor in past}
    if len(lengths) != 1:
        raise CacheHandleError(
            f"The layers of the past KV cache have different lengths {sorted(lengths)}: crop all of them, or none."
        )
    session = find(past[0])
    if session is None:
        session = _adopt(past)
        past = issue(session)  # in place of copies, which may take as much memory as a real cache
    else:
        key = past[0].untyped_storage()._cdata
        offsets = [tensor.storage_offset() for tensor in past]
        if any(tensor.untyped_storage()._cdata != key for tensor in past) or offsets != sorted(set(offsets)):
            raise CacheHandleError(
                "The past KV tensors of this call come from several caches, or in another order than the model"
                " returned them. Pass the cache of one call back as it was."
            )
    kv_len = next(iter(lengths))
    return session, [handles.resize(tensor, kv_len) for tensor in past]


def _adopt(past: Sequence[torch.Tensor]) -> Session:
    """Recognise handles that were copied: only in the same rows, and only if the original is gone."""
    found: Session | None = None
    for slot, tensor in enumerate(past):
        codes = handles.decode(tensor)
        if codes is None:
            raise CacheHandleError(
                f"The past KV tensor of shape {tuple(tensor.shape)} was not made by a model compiled with specache"
                " (its prompt ran elsewhere, or before compiling, or with gradients enabled). Run the prompt through"
                " the compiled model, under torch.no_grad(), and pass on the cache that it returns."
            )
        entry = _entries.get(codes[0].session)
        if entry is None:
            raise CacheHandleError(
                "The past KV cache belongs to a session that has ended, because all of its tensors were dropped."
                " Keep the cache that the model returned, or start from the prompt."
            )
        rows = [code.row for code in codes]
        if any(code.session != codes[0].session for code in codes) or rows != list(
            range(entry.session.batch or 0)
        ):
            raise CacheHandleError(
                f"The past KV cache was reordered: its batch rows are now rows {rows} of a session with"
                f" {entry.session.batch}. {_NOT_YET}"
            )
        if any(code.slot != slot for code in codes) or found not in (None, entry.session):
            raise CacheHandleError(
                "The past KV tensors of this call come from several caches, or in another order than the model"
                " returned them. Pass the cache of one call back as it was."
            )
        if not entry.storage.expired():
            raise CacheHandleError(
                f"The past KV cache is a copy of one that is still in use (a fork). {_NOT_YET}"
            )
        found = entry.session
    assert found is not None
    return found

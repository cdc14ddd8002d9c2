"""Which session a tensor belongs to: by storage identity, else by what its NaN-boxed rows say.

The registry holds sessions by the storage of their handles, weakly: once the last handle is gone, so is the session,
at the next forward pass (a cache that is reordered or copied drops all its old handles before it uses the new ones).
"""

from __future__ import annotations

import itertools
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
_MIXED = (
    "The past KV tensors of this call come from several caches, or in another order than the model returned them, or"
    " their oldest tokens were cut off. Pass the cache of one call back as it was: only its newest tokens can be cut"
    " off (crop)."
)
_ENDED = (
    "The past KV cache belongs to a session that has ended (all of its tensors were dropped), or to a branch that was"
    " left: the same cache went on from an earlier token since. Keep the cache that the model returned last, or start"
    " from the prompt."
)


@dataclass
class _Issue:
    """One set of handles.

    Attributes:
        session: Whose.
        storage: Dies with the last of them.
        valid_len: Tokens up to which they tell the session's history: fewer than they had once the session was rolled
            back and went on otherwise. None for the newest set.
    """

    session: Session
    storage: StorageWeakRef
    valid_len: int | None = None


_codes = itertools.count(1)
_issues: dict[int, _Issue] = {}  # by the code that the handles carry
_open: WeakValueDictionary[int, Session] = WeakValueDictionary()  # also those in their first prefill


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
    """Make handles for a session, keys and values in turn, layer by layer, and remember whose they are."""
    assert session.batch is not None
    slots = [
        (shape.num_kv_heads, dim) for shape in session.shapes for dim in (shape.key_dim, shape.value_dim)
    ]
    code = next(_codes) % handles.MAX_SESSION
    made = handles.issue(code, slots, session.batch, session.kv_len, session.dtype, session.device)
    _issues[code] = _Issue(session, StorageWeakRef(made[0].untyped_storage()))
    return made


def sweep() -> None:
    """Free the sessions whose last handle is gone."""
    for code in [code for code, issued in _issues.items() if issued.storage.expired()]:
        session = _issues.pop(code).session
        if all(issued.session is not session for issued in _issues.values()):
            session.close()


def find(tensor: torch.Tensor) -> Session | None:
    """The live session of a handle, or None (`stats()`, and the fast path of `resolve`)."""
    issued = _issue_of(tensor)
    return None if issued is None else issued.session


def _issue_of(tensor: torch.Tensor) -> _Issue | None:
    key = tensor.untyped_storage()._cdata
    for issued in _issues.values():
        if issued.storage.cdata == key and not issued.storage.expired():
            return issued
    return None


def first_handle(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first of several floating-point 4-D tensors that is a handle or a copy of one.

    Costs one read of the device, whatever their number: only what begins with NaN is looked at closely.
    """
    known = {issued.storage.cdata for issued in _issues.values() if not issued.storage.expired()}
    for tensor in tensors:
        if tensor.untyped_storage()._cdata in known:
            return tensor
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return None
    starts = torch.stack([tensor.detach()[0, 0, 0, 0].to(full[0].device, torch.float32) for tensor in full])
    for tensor, is_nan in zip(full, starts.isnan().tolist(), strict=True):
        if is_nan and handles.decode(tensor) is not None:
            return tensor
    return None


@dataclass(frozen=True)
class Claim:
    """What the past KV inputs of a call say.

    Attributes:
        session: Whose they are.
        kv_len: Tokens that the caller believes to be there.
        past: The inputs, where they are the session's own handles; None where they are copies.
    """

    session: Session
    kv_len: int
    past: list[torch.Tensor] | None


def resolve(past: Sequence[torch.Tensor]) -> Claim:
    """Find the session that the past KV inputs of one graph belong to. Changes nothing.

    Args:
        past: The inputs, keys and values in turn, layer by layer.

    Raises:
        CacheHandleError: If they are no handles, are of several sessions or lengths, of a session that has ended or a
            branch that was left, or were permuted, repeated or forked.
    """
    lengths = {tensor.shape[2] for tensor in past}
    if len(lengths) != 1:
        raise CacheHandleError(
            f"The layers of the past KV cache have different lengths {sorted(lengths)}: crop all of them, or none."
        )
    kv_len = next(iter(lengths))
    issued = _issue_of(past[0])
    own = issued is not None
    if issued is None:
        issued = _adopt(past)
    else:
        key, offset = past[0].untyped_storage()._cdata, 0
        for tensor in past:
            if tensor.untyped_storage()._cdata != key or tensor.storage_offset() != offset:
                raise CacheHandleError(_MIXED)
            if tensor.shape[0] != issued.session.batch:
                raise CacheHandleError(
                    f"The past KV cache was cut to {tensor.shape[0]} of its {issued.session.batch} batch rows."
                    f" {_NOT_YET}"
                )
            offset += tensor.shape[0] * tensor.shape[3]
    if issued.valid_len is not None and kv_len > issued.valid_len:
        raise CacheHandleError(_ENDED)
    return Claim(issued.session, kv_len, list(past) if own else None)


def take(claim: Claim) -> list[torch.Tensor]:
    """Bring the session to the length that the caller believes, and give handles of it.

    Where that discards tokens, the handles that counted them are void from then on (another branch): the ones returned
    are new.
    """
    session = claim.session
    discards = claim.kv_len < session.kv_len
    session.rewind(claim.kv_len)
    if claim.past is not None and not discards:
        return claim.past
    for issued in _issues.values():
        if issued.session is session and (discards or issued.valid_len is None):
            known = session.kv_len if issued.valid_len is None else issued.valid_len
            issued.valid_len = min(known, session.kv_len)
    return issue(session)


def _adopt(past: Sequence[torch.Tensor]) -> _Issue:
    """Recognise handles that were copied: only in the same rows, and only if the original is gone."""
    found: _Issue | None = None
    for slot, tensor in enumerate(past):
        codes = handles.decode(tensor)
        if codes is None:
            raise CacheHandleError(
                f"The past KV tensor of shape {tuple(tensor.shape)} was not made by a model compiled with specache"
                " (its prompt ran elsewhere, or before compiling, or with gradients enabled, or its attention was left"
                " alone then; or the oldest tokens of a copy were cut off). Run the prompt through the compiled"
                " model, under torch.no_grad(), and pass on the cache"
                " that it returns; specache_fx.explain() says what was left alone."
            )
        issued = _issues.get(codes[0].session)
        if issued is None:
            raise CacheHandleError(_ENDED)
        batch, rows = issued.session.batch or 0, [code.row for code in codes]
        if any(code.session != codes[0].session for code in codes) or rows != list(range(batch)):
            raise CacheHandleError(
                f"The past KV cache was reordered: its batch rows are now rows {rows} of a session with {batch}."
                f" {_NOT_YET}"
            )
        if any(code.slot != slot for code in codes) or found not in (None, issued):
            raise CacheHandleError(_MIXED)
        if not issued.storage.expired():
            raise CacheHandleError(
                f"The past KV cache is a copy of one that is still in use (a fork). {_NOT_YET}"
            )
        found = issued
    assert found is not None
    return found

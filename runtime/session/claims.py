"""Resolve the past KV inputs of a call to a session: as it is, cut, reordered or copied.

Handles are known by their storage, copies of handles by what their NaN-boxed rows say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError
from specache_fx.runtime.handles import handle as handles
from specache_fx.runtime.handles.handle_form import is_whole
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.session.snapshot import fork

MIXED = (
    "The past KV tensors of this call come from several caches or in another order, or their oldest tokens were cut"
    " off. Pass the cache of one call back as the model returned it: only its newest tokens can be cut off (crop)."
)
REORDERED = (
    "Copy batch rows with index_select (Cache.reorder_cache, batch_select_indices, batch_repeat_interleave) or deepcopy"
    " the cache, at the length that it has."
)
CHOSEN = (
    "The past KV cache was edited: its elements are not those that the model returned, head by head and token after"
    " token from the first on. It holds placeholders, and only its newest tokens can be cut off (crop). Use the model"
    " uncompiled to change keys and values, to permute heads, to evict tokens, or to put the cache together outside of"
    " the model."
)
_ENDED = (
    "The past KV cache belongs to a session that has ended: it is a copy, and all tensors of its original were dropped."
    " A copy that was saved and loaded, or made within a compiled function, does not keep the session. Keep the"
    " original until such a copy is used, or start from the prompt."
)
_RELEASED = (
    "The past KV cache was released (specache_fx.release, or a call that failed midway), and its pairs are gone. Start"
    " from the prompt, and release a cache when it is not needed any more."
)
_PARTS = (
    "A graph reads {count} of the {layers} layers of the past KV cache. Dynamo breaks the model's graph between layers"
    ' here, and did not in the prompt. TORCH_LOGS="graph_breaks" shows where. Take the break out (.item(), print, or an'
    ' if on a tensor), or compile this model with backend="inductor".'
)
LEFT = (
    "The past KV cache belongs to a branch that was left: the same cache has since gone on from an earlier token. Keep"
    " the cache that the model returned last, or start from the prompt."
)
ELSEWHERE = (
    "The past KV cache was made in another process, which has its keys and values. Pickled, sent elsewhere or inherited"
    " by a forked process, its tensors are placeholders: save it there with specache_fx.save(), and load it here with"
    " specache_fx.load()."
)


@dataclass(frozen=True)
class Claim:
    """The session that past KV inputs claim, with length and rows.

    Attributes:
        issued: The set of handles that they are, or are copies of.
        kv_len: Length of the cache, as the caller's tensors tell it.
        past: The inputs.
        is_copy: They are copies of the session's handles, and not its own.
        rows: Batch rows of the session, in the order of the inputs'.
    """

    issued: registry.Issue
    kv_len: int
    past: Sequence[torch.Tensor]
    is_copy: bool
    rows: list[int]

    @property
    def session(self) -> Session:
        """Whose they are."""
        return self.issued.session


@registry.locked
def resolve(
    past: Sequence[torch.Tensor], config: SpecacheConfig, shapes: tuple[LayerShape, ...]
) -> tuple[Session, list[torch.Tensor]]:
    """Give the session that the past KV inputs of a call belong to, at the length that the caller believes.

    A copy is a cache of its own, whoever goes on first. So a call gets a session of its own (a fork) where other
    tensors hold the state that it would change: copies, or for a copy the session's handles.

    Else the call has the session itself. Its handles, uncut, go on as they are. Cut: new ones; older handles that
    counted the tokens that are discarded are void from then on (another branch). Copies: the batch rows are put into
    their order (beam search).

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
    try:
        claim = read_claim(past)
    except CacheHandleError:
        _check_whole(past, config, shapes)
        raise
    session = claim.session
    if session.config != config or session.shapes != shapes:
        _check_whole(past, config, shapes)
        raise CacheHandleError(
            f"The past KV cache was made with {session.config} for {len(session.shapes)} layers; this graph was"
            f" compiled with {config} for {len(shapes)}. Use a cache with the compiled model that made it."
        )
    with registry.try_hold(session):
        return _take(claim)


def read_claim(past: Sequence[torch.Tensor]) -> Claim:
    """Find the session of past KV inputs, their length and their rows. Changes nothing.

    Raises:
        CacheHandleError: As `resolve`.
    """
    issued = registry.issue_of(past[0])
    claim = _recognise(past) if issued is None else _own(living(issued), past)
    valid_len = claim.issued.valid_len
    if valid_len is not None and claim.kv_len > valid_len:
        raise CacheHandleError(LEFT)
    return claim


def by_session(tensors: Sequence[torch.Tensor]) -> dict[int, list[tuple[int, int]]]:
    """The handles among tensors: of each session, by its number, their slots and places.

    Raises:
        CacheHandleError: If another process made one.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for place, tensor in enumerate(tensors):
        if (code := handles.first_code(tensor)) is not None:
            if not code.is_ours:
                raise CacheHandleError(ELSEWHERE)
            found.setdefault(code.session, []).append((code.slot, place))
    return found


def living(issued: registry.Issue | None) -> registry.Issue:
    """A set of handles whose session is still there.

    Raises:
        CacheHandleError: If there is no such set, or its session was released.
    """
    if issued is None:
        raise CacheHandleError(_ENDED)
    check_open(issued.session)
    return issued


def _check_whole(
    past: Sequence[torch.Tensor], config: SpecacheConfig, shapes: tuple[LayerShape, ...]
) -> None:
    """Raise where the inputs of a call are some layers' of a cache that this model made."""
    known = registry.find(past[0])
    if known is None or known.closed or known.config != config:
        return
    if len(shapes) < len(known.shapes) and set(shapes) <= set(known.shapes):
        raise CacheHandleError(_PARTS.format(count=len(shapes), layers=len(known.shapes)))


def check_open(session: Session) -> None:
    """Raise the `CacheHandleError` of a session that was released. Calls do so behind its lock."""
    registry.check_running()
    if session.closed:
        raise CacheHandleError(_RELEASED)


def _claimed_length(session: Session, past: Sequence[torch.Tensor]) -> int:
    """Tokens that the caller believes to be there, by the lengths of the handles.

    A layer that keeps a window tells it until that is full. Where no layer tells more, the handles have it noted, and
    so have their copies.

    Raises:
        CacheHandleError: If the layers disagree, or it can't be told.
    """
    kv_len = known_length(session.shapes, past)
    if kv_len is None:
        noted = {getattr(tensor, "kv_len", None) for tensor in past}
        kv_len = noted.pop() if len(noted) == 1 else None
    if kv_len is None:
        if session.kv_len != max(tensor.shape[2] for tensor in past):
            raise CacheHandleError(
                "The number of tokens in this past KV cache can't be told: each of its layers keeps a window that is"
                " full, and its tensors are of several calls, or copies that were pickled or made within a compiled"
                " function. Copy the cache with deepcopy, outside of compiled functions, or start from the prompt."
            )
        return session.kv_len
    return kv_len


def known_length(shapes: Sequence[LayerShape], past: Sequence[torch.Tensor]) -> int | None:
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
        raise CacheHandleError(MIXED)
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
            " Where another thread generates with it, a step was just ending: try again."
        )
    return kv_len


def _own(issued: registry.Issue, past: Sequence[torch.Tensor]) -> Claim:
    newest, batch = issued.session.newest, issued.session.batch or 0
    kv_len = newest.kv_len if newest is not None and newest.are(past) else None
    key, offset = past[0].untyped_storage()._cdata, 0
    for tensor in past if kv_len is None else ():
        if tensor.untyped_storage()._cdata != key:
            raise CacheHandleError(MIXED)
        if tensor.shape[0] != batch:
            raise CacheHandleError(
                f"The past KV cache has {tensor.shape[0]} of its {batch} batch rows, by slicing or expanding."
                f" {REORDERED}"
            )
        if tensor.storage_offset() != offset:
            raise CacheHandleError(MIXED)
        if not is_whole(tensor):
            raise CacheHandleError(CHOSEN)
        offset += tensor.shape[0] * tensor.shape[3]
    # A write by another way (DLPack, the storage) counted no version.
    codes = issued.codes
    changed = codes is not None and not torch.equal(handles.codes_of(past[0], len(codes)), codes)
    if changed or handles.were_written(past):
        raise CacheHandleError(CHOSEN)
    if kv_len is None:
        kv_len = _claimed_length(issued.session, past)
    return Claim(issued, kv_len, past, False, list(range(batch)))


def _recognise(past: Sequence[torch.Tensor]) -> Claim:
    """Read off copies of handles whose they are."""
    found: registry.Issue | None = None
    first: list[int] | None = None
    number = 0
    for slot, tensor in enumerate(past):
        codes = handles.decode(tensor)
        if codes is None:
            raise CacheHandleError(
                f"The past KV tensor of shape {tuple(tensor.shape)} is no cache of a model compiled with specache, and"
                " other layers' are; or heads of a copy were permuted, or its oldest tokens cut off. Pass the cache of"
                " one call back as the model returned it."
            )
        if not codes[0].is_ours:
            raise CacheHandleError(ELSEWHERE)
        issued = living(registry.by_code(codes[0].session))
        rows = [code.row for code in codes]
        same = all(code.session == codes[0].session and code.slot == slot for code in codes)
        if not same or found not in (None, issued) or first not in (None, rows):
            raise CacheHandleError(MIXED)
        found, first, number = issued, rows, codes[0].session
    assert found is not None and first is not None
    session = found.session
    kv_len = _claimed_length(session, past)
    if not handles.matches(past, number, session.batch or 0, first):
        raise CacheHandleError(CHOSEN)
    if min(first) and session.kv_len - kv_len >= min(tensor.shape[3] for tensor in past):
        # Without its `head_dim` oldest tokens, a row looks like the next row.
        raise CacheHandleError(
            f"The past KV cache holds rows {first} of a session's {session.batch} at {kv_len} tokens, where the session"
            f" has {session.kv_len}: its oldest tokens may have been cut off. {REORDERED}"
        )
    if found.moved is not None:
        if first != found.moved:
            raise CacheHandleError(LEFT)
        first = list(range(session.batch or 0))
    return Claim(found, kv_len, past, True, first)


def _take(claim: Claim) -> tuple[Session, list[torch.Tensor]]:
    session, rows = claim.session, claim.rows
    discards = claim.kv_len < session.kv_len
    shared = claim.is_copy and registry.is_held(session)
    if shared or len(rows) != session.batch or registry.has_copies(session, claim.past, discards):
        session.rewind(session.kv_len)  # a step that failed midway leaves some layers longer
        session = fork(session, rows)
        session.rewind(claim.kv_len)
        registry.touch(session)
        return session, registry.issue(session)
    if claim.is_copy:
        session.next_answer = None  # as in a fork
        if rows != list(range(len(rows))):
            _reorder(claim)
    registry.touch(session)
    session.rewind(claim.kv_len)
    # A step that failed may have gone back already; its handles are lost, and the older ones end here.
    if not claim.is_copy and not discards and claim.issued.valid_len is None:
        return session, list(claim.past)
    for issued in registry.issues_of(session):
        if discards or issued.valid_len is None:
            known = session.kv_len if issued.valid_len is None else issued.valid_len
            issued.valid_len = min(known, session.kv_len)
    return session, registry.issue(session)


def _reorder(claim: Claim) -> None:
    session = claim.session
    # The rows of other sets are others now.
    registry.forget([issued for issued in registry.issues_of(session) if issued is not claim.issued])
    try:
        session.reorder(claim.rows)
    except BaseException:
        # Some layers have moved and some have not.
        session.close()
        registry.forget([claim.issued])
        raise
    claim.issued.moved = claim.rows

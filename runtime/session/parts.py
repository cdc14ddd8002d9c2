"""The sessions behind a whole cache: locked, cut to the length and put in the row order that its tensors tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specache_fx.errors import CacheHandleError
from specache_fx.runtime.handles.handle_form import MOST_DIMS, num_sides
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.claims import MIXED, by_session, check_open, living, read_claim
from specache_fx.runtime.session.give_back import with_heads_first
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.session.snapshot import fork


@dataclass(frozen=True)
class SessionPart:
    """One session of a cache.

    Attributes:
        session: It, or a copy of the part that the cache still has.
        places: Of its handles among the tensors, by slot: keys and values in turn, layer by layer. A pair is in one.
    """

    session: Session
    places: list[int]


@contextlib.contextmanager
def parts_of(tensors: Sequence[torch.Tensor]) -> Iterator[list[SessionPart]]:
    """The sessions of some handles, all locked within the block; none where no tensor is a handle.

    Args:
        tensors: Of a cache, in any order. Others than handles are left out.

    Raises:
        CacheHandleError: As `resolve`, or if some of a session's handles are missing.
        HostMemoryError: If a cache that was cropped, or whose rows were reordered, can't be copied.
    """
    with contextlib.ExitStack() as stack:
        yield _parts(tensors, stack)


@registry.locked
def _parts(tensors: Sequence[torch.Tensor], stack: contextlib.ExitStack) -> list[SessionPart]:
    found = {number: dict(places) for number, places in by_session(tensors).items()}
    ours = {place for places in found.values() for place in places.values()}
    rest = [
        t
        for i, t in enumerate(tensors)
        if i not in ours and 3 <= t.dim() <= MOST_DIMS and t.is_floating_point()
    ]
    if registry.first_handle(rest) is not None:
        raise CacheHandleError(MIXED)
    with contextlib.ExitStack() as held:  # given up where it has to begin anew
        parts = [_part(tensors, number, found[number], held) for number in sorted(found)]
        stack.enter_context(held.pop_all())
    return parts


def _part(
    tensors: Sequence[torch.Tensor], number: int, by_slot: dict[int, int], stack: contextlib.ExitStack
) -> SessionPart:
    session = living(registry.by_code(number)).session
    for slot, place in list(by_slot.items()):
        by_slot |= dict.fromkeys(range(slot, slot + num_sides(session.forms[slot])), place)
    if sorted(by_slot) != list(range(2 * len(session.shapes))):
        raise CacheHandleError(MIXED)
    places = [by_slot[slot] for slot in range(len(by_slot))]
    first = {place: slot for slot, place in reversed([*enumerate(places)])}
    past = [
        with_heads_first(tensors[place], session, first[place])[slot - first[place]]
        for slot, place in enumerate(places)
    ]
    claim = read_claim(past)
    session = claim.session
    stack.enter_context(registry.try_hold(session))
    check_open(session)
    session.rewind(session.kv_len)  # a step that failed midway leaves some layers longer
    if claim.kv_len != session.kv_len or claim.rows != list(range(session.batch or 0)):
        session = fork(session, claim.rows)
        stack.callback(session.close)
        session.rewind(claim.kv_len)
    return SessionPart(session, places)

"""Give back 16-bit pairs in place of handles, to a graph that reads them itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specache_fx.errors import CacheHandleError
from specache_fx.runtime.handles import handle as handles
from specache_fx.runtime.handles.handle_form import dims_of, is_whole, joined, num_sides, sides_of
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.claims import CHOSEN, LEFT, MIXED, REORDERED, by_session, living, read_claim
from specache_fx.runtime.session.session import Session


@registry.locked
def give_back(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The 16-bit pairs of handles, for a graph that reads them itself.

    Args:
        tensors: Inputs of a call, handles among them, in any order. Of a session all, or some as it gave them last.

    Returns:
        By place among `tensors`: 16-bit keys or values on the device, as the model would have cached them. Where the
        policy keeps no 16-bit copy, the low-bit one's numbers.

    Raises:
        CacheHandleError: As `resolve`.
    """
    real: dict[int, torch.Tensor] = {}
    for number, found in by_session(tensors).items():
        issued = living(registry.by_code(number))
        sides = dict[int, torch.Tensor]()  # by slot
        for slot, place in sorted(found):
            sides |= enumerate(with_heads_first(tensors[place], issued.session, slot), slot)
        numbers = dict(zip(sides, numbers_of([*sides], [*sides.values()]), strict=True))
        for slot, place in found:
            form = issued.session.forms[slot]
            parts = [numbers[slot + i] for i in range(num_sides(form))]
            real[place] = joined(parts, form).contiguous()
    return real


def with_heads_first(tensor: torch.Tensor, session: Session, slot: int) -> list[torch.Tensor]:
    """A handle of a session, or a copy of one, as `[batch, num_kv_heads, kv_len, head_dim]`; of a pair two.

    Raises:
        CacheHandleError: If it has lost a dimension, or has one more.
    """
    form = session.forms[slot]
    if tensor.dim() != len(dims_of(form)):
        raise CacheHandleError(REORDERED)
    return sides_of(tensor, form, session.shapes[slot // 2].num_kv_heads, is_handle=True)


@registry.locked
def numbers_of(slots: Sequence[int], past: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 16-bit pairs of one session's handles, heads first: of all slots, or of some as the last call returned them.

    Args:
        slots: In order.
        past: The handles, or copies of them, heads first.

    Raises:
        CacheHandleError: As `resolve`.
    """
    issued = registry.issue_of(past[0])
    if issued is not None and len(slots) < 2 * len(issued.session.shapes):
        session, lengths = issued.session, issued.session.handle_lengths()
        same = all(registry.issue_of(tensor) is issued for tensor in past)
        if not same or any(tensor.shape[2] != lengths[i] for i, tensor in zip(slots, past, strict=True)):
            raise CacheHandleError(MIXED)
        if handles.were_written(past) or not all(map(is_whole, past)):
            raise CacheHandleError(CHOSEN)
        if issued.valid_len is not None and session.kv_len > issued.valid_len:
            raise CacheHandleError(LEFT)
        kv_len, rows = session.kv_len, list(range(past[0].shape[0]))
    else:
        claim = read_claim(past)
        session, kv_len, rows = claim.session, claim.kv_len, claim.rows
    with registry.try_hold(session):
        if kv_len > session.kv_len:
            raise CacheHandleError(MIXED)
        layers = {layer: session.load(layer, kv_len) for layer in dict.fromkeys(slot // 2 for slot in slots)}
    index = torch.tensor(rows, device=session.device)
    return [layers[slot // 2][slot % 2].index_select(0, index) for slot in slots]

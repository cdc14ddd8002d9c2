"""A model's masks while it decodes, beyond the padding that its session knows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specache_fx.capture.program import Program
from specache_fx.errors import UnsupportedGraphError
from specache_fx.runtime.masks import by_lane, hidden_bias, over_keys, real_keys, split_row
from specache_fx.runtime.session import Session
from specache_fx.runtime.sources import Sources


@dataclass(frozen=True)
class StepMasks:
    """The model's masks for the output token, one of each per result of `Sources.mask_graph`.

    Attributes:
        biases: Added to the scores, `[batch or 1, num_heads or 1, kv_len + 1]`; None where nothing is.
        seen: Which keys are shown, bool `[batch, kv_len + 1]`, where the step reads that on the device; None where the
            session's padding and `biases` say it.
        shows_padding: Keys that were padding are shown: the staged pairs were not chosen from them.
    """

    biases: list[torch.Tensor | None]
    seen: list[torch.Tensor | None]
    shows_padding: bool = False


def read_masks(
    session: Session, program: Program, args: Sequence[Any], ahead: bool, compare: bool = False
) -> StepMasks:
    """Evaluate the model's own masks for the output token.

    The decode graph has no masks: it hides the prompt's padding and nothing else. Keys
    that a mask hides besides get a bias of -inf (a sliding window over a cache that keeps all tokens, an
    attention_mask that changed).

    To compare a mask with the padding, the host waits for the device. Where steps read masks on the device
    (`WholeSteps.reads_masks`), the host compares them at the start and whenever a group fills. Other steps see what
    the masks show, and compare nothing.

    Args:
        session: The session. `masks_move` is set where a mask hides, or in the next `group_size` tokens will hide, more
            than the padding.
        program: The findings on the graph.
        args: Dynamo's inputs.
        ahead: Look a group of tokens ahead as well: at the start and whenever a group fills.
        compare: Compare the masks on the host in every step.

    Raises:
        UnsupportedGraphError: If an additive mask hides every key of a row.
    """
    assert program.decoding is not None and session.batch is not None
    sources = program.decoding.sources
    kv_len = session.kv_len + 1
    rows = [over_keys(mask, kv_len) for mask in sources.masks_at(args, 0)]
    no_mask = any(site.core.mask is None and site.keys.window is None for site in program.sites)
    shows_all = no_mask and session.key_mask.real is not None
    seen = None if shows_all else _seen(session, sources, rows)
    if seen is not None and not (ahead or compare or session.masks_move):
        return StepMasks([None] * len(rows), seen)
    split, agree = _compared(session, rows, kv_len)
    shown: list[torch.Tensor | None] = []
    for row, (real, _), agrees in zip(rows, split, agree, strict=True):
        if not agrees:
            _check_hidden(row, real, program)
            shown.append(real)
    if no_mask:
        shown.append(None)
    shows_padding = False
    for real in () if session.key_mask.real is None else shown:
        shows_padding |= session.key_mask.show(real, kv_len)
    if shows_padding:
        session.requantize()
        agree = [session.key_mask.agrees(real, kv_len) for real, _ in split]
    moves = not all(agree) or (session.masks_move and not ahead)
    if ahead and not moves and not sources.fixed_length:
        moves = _moves_soon(session, sources, args)
    session.masks_move = moves
    biases = [
        bias if agrees else hidden_bias(real, bias) for (real, bias), agrees in zip(split, agree, strict=True)
    ]
    return StepMasks(biases, [None] * len(rows) if seen is None or moves else seen, shows_padding)


def _seen(
    session: Session, sources: Sources, rows: Sequence[torch.Tensor]
) -> list[torch.Tensor | None] | None:
    """`StepMasks.seen`; None where the host has to compare the masks."""
    assert session.batch is not None
    if session.steps is None or not session.steps.reads_masks or sources.fixed_length:
        return None
    seen = [real_keys(row, session.batch) for row in rows]
    return None if any(real is None for real in seen) else seen


def _compared(
    session: Session, rows: Sequence[torch.Tensor], kv_len: int
) -> tuple[list[tuple[torch.Tensor | None, torch.Tensor | None]], list[bool]]:
    """`split_row` of each row, and whether the row hides just the padding. Most do."""
    assert session.batch is not None
    split: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    agree = []
    for row in rows:
        seen = real_keys(row, session.batch)
        padding = session.key_mask.at(kv_len)
        if seen is not None and _is_all_of(seen, padding):
            split.append((padding, None))
            agree.append(True)
        else:
            split.append(split_row(row, session.batch))
            agree.append(session.key_mask.agrees(split[-1][0], kv_len))
    return split, agree


def _is_all_of(seen: torch.Tensor, padding: torch.Tensor | None) -> bool:
    return bool(seen.all()) if padding is None else torch.equal(seen, padding)


def _check_hidden(row: torch.Tensor, seen: torch.Tensor | None, program: Program) -> None:
    """SDPA gives 0 where a row has no key to see; an additive mask makes numbers of it that are the model's own."""
    if seen is not None and row.dtype != torch.bool and not bool(seen.any(-1).all()):
        site = next(site for site in program.sites if site.core.mask is not None and site.keys.window is None)
        raise UnsupportedGraphError(
            f"The mask of attention `{site.core.node.name}` ({site.source}) hides every key of a row. Give each row a"
            ' token that it sees, or compile this model with backend="inductor".'
        )


def _moves_soon(session: Session, sources: Sources, args: Sequence[Any]) -> bool:
    """Whether a mask will hide more than the padding within a group of tokens, or that can't be known."""
    assert session.batch is not None
    kv_len = session.kv_len + 1 + session.config.group_size
    try:
        masks = sources.masks_at(args, session.config.group_size)
    except (IndexError, RuntimeError):
        return True  # the model has no such position
    return not all(_compared(session, [over_keys(mask, kv_len) for mask in masks], kv_len)[1])


def step_biases(
    session: Session,
    sources: Sources,
    args: Sequence[Any],
    biases: Sequence[torch.Tensor | None],
    lanes: int,
    ahead: int,
) -> dict[int, torch.Tensor]:
    """The model's bias on each layer's scores in a step, by layer; see `DecodeInputs.bias`.

    Args:
        session: The session.
        sources: Of the decode graph.
        args: Dynamo's inputs.
        biases: Of the output token, from `read_masks`.
        lanes: Tokens of the step.
        ahead: Tokens from lane 0 to lane 1, 0 in pre-decode.
    """
    if all(bias is None for bias in biases) and (lanes == 1 or not session.masks_move):
        return {}
    assert session.batch is not None
    rows = [biases]
    if lanes > 1:
        following = biases  # also where the model has no further position: nothing will come of that lane
        if ahead:
            with contextlib.suppress(IndexError, RuntimeError):
                kv_len = session.kv_len + 1 + ahead
                rows_ahead = (over_keys(mask, kv_len) for mask in sources.masks_at(args, ahead))
                masks = [split_row(row, session.batch) for row in rows_ahead]
                following = [hidden_bias(*mask) if session.masks_move else mask[1] for mask in masks]
        rows.append(following)
    stacked = [by_lane(row, session.kv_len, independent=not ahead) for row in zip(*rows, strict=True)]
    chosen = {layer: stacked[mask] for layer, mask in sources.layer_masks.items()}
    return {layer: bias for layer, bias in chosen.items() if bias is not None}


def step_sees(
    session: Session, sources: Sources, masks: StepMasks, lanes: int, ahead: int
) -> dict[int, torch.Tensor]:
    """`DecodeStep.seen`: lane 1 sees lane 0's keys, and its own pair.

    Args:
        session: The session.
        sources: Of the decode graph.
        masks: Of the output token.
        lanes: Tokens of the step.
        ahead: As in `step_biases`: in pre-decode each lane sees its own pair alone.
    """
    laid_out = [
        by_lane([row] * lanes, session.kv_len, independent=True)
        if row is None or not ahead
        else torch.stack([F.pad(row, (0, lanes - 1), value=lane > 0) for lane in range(lanes)])
        for row in masks.seen
    ]
    chosen = {layer: laid_out[mask] for layer, mask in sources.layer_masks.items()}
    return {layer: seen for layer, seen in chosen.items() if seen is not None}

"""A model's masks while it decodes: beyond the padding that its session knows, and over windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specache_fx.capture.program import Program
from specache_fx.errors import UnsupportedGraphError
from specache_fx.runtime.graph.sources import PositionalPart
from specache_fx.runtime.layers.masks import (
    WindowMask,
    by_lane,
    hidden_bias,
    over_keys,
    real_keys,
    split_row,
)
from specache_fx.runtime.session.session import Session

Split = tuple[torch.Tensor | None, torch.Tensor | None]  # from `split_row`


@dataclass(frozen=True)
class StepMasks:
    """The model's masks of attentions to all tokens, one of each per result of `Decoding.masks`.

    Attributes:
        session: The session.
        part: Computes them.
        args: Dynamo's inputs.
        biases: Added to the output token's scores, `[batch or 1, num_heads or 1, kv_len + 1]`; None where nothing is.
        seen: Which keys are shown to it, bool `[batch, kv_len + 1]`, where the step reads that on the device; None
            where the session's padding and `biases` say it.
        shows_padding: Keys that were padding are shown: the staged pairs were not chosen from them.
    """

    session: Session
    part: PositionalPart
    args: Sequence[Any]
    biases: list[torch.Tensor | None]
    seen: list[torch.Tensor | None]
    shows_padding: bool = False

    @property
    def hides_padding(self) -> bool:
        """Whether the masks hide the padding, and nothing is added to scores: lane 1 sees that too."""
        return not self.session.masks_move and all(bias is None for bias in self.biases)

    def biases_of(self, lanes: int, ahead: int) -> dict[int, torch.Tensor]:
        """The model's bias on each layer's scores in a step, by layer; see `DecodeInputs.bias`.

        Args:
            lanes: Tokens of the step.
            ahead: Tokens from lane 0 to lane 1, 0 in pre-decode.
        """
        session = self.session
        if all(bias is None for bias in self.biases) and (lanes == 1 or not session.masks_move):
            return {}
        rows = [self.biases]
        if lanes > 1:
            following = _rows(session, self.part, self.args, ahead) if ahead else None
            if (
                following is None
            ):  # also where the model has no further position: nothing will come of that lane
                rows.append(self.biases)
            else:
                assert session.batch is not None
                masks = [split_row(row, session.batch) for row in following]
                rows.append([hidden_bias(*mask) if session.masks_move else mask[1] for mask in masks])
        return self._by_layer(
            [by_lane(row, session.kv_len, independent=not ahead) for row in zip(*rows, strict=True)]
        )

    def seen_by(self, lanes: int, ahead: int) -> dict[int, torch.Tensor]:
        """`DecodeStep.seen`: lane 1 sees lane 0's keys, and its own pair. In pre-decode each sees its own alone."""
        return self._by_layer(
            [
                by_lane([row] * lanes, self.session.kv_len, independent=True)
                if row is None or not ahead
                else torch.stack([F.pad(row, (0, lanes - 1), value=lane > 0) for lane in range(lanes)])
                for row in self.seen
            ]
        )

    def _by_layer(self, of_masks: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        chosen = {layer: of_masks[place] for layer, place in self.part.layers.items()}
        return {layer: each for layer, each in chosen.items() if each is not None}


def _rows(
    session: Session, part: PositionalPart, args: Sequence[Any], ahead: int
) -> list[torch.Tensor] | None:
    """The rows of masks of the token `ahead` of the output token; None where the model has no such position."""
    rows = part.ahead(args, ahead)
    return None if rows is None else [over_keys(row, session.kv_len + 1 + ahead) for row in rows]


def read_masks(
    session: Session, program: Program, args: Sequence[Any], ahead: bool, compare: bool = False
) -> StepMasks:
    """Evaluate the model's own masks for the output token.

    The decode graph has no masks: it hides the prompt's padding and nothing else. Keys
    that a mask hides besides get a bias of -inf (a sliding window over a cache that keeps all tokens, an
    attention_mask that changed).

    To compare a mask with the padding, the host waits for the device. Where steps read masks on the device
    (`FusedSteps.reads_masks`), the host compares them at the start and whenever a group fills. Other steps see what
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
    part, fixed_length = program.decoding.masks, program.decoding.sources.fixed_length
    kv_len, rows = session.kv_len + 1, _rows(session, part, args, 0) or []
    unknown: list[torch.Tensor | None] = [None] * len(rows)
    no_mask = any(site.core.mask is None and site.keys.window is None for site in program.sites)
    shows_all = no_mask and session.key_mask.real is not None
    seen = None if shows_all or fixed_length else _seen(session, rows)
    if seen is not None and not (ahead or compare or session.masks_move):
        return StepMasks(session, part, args, unknown, seen)
    split = [split_row(row, session.batch) for row in rows]
    agree = _hide_padding(session, split, kv_len)
    shown: list[torch.Tensor | None] = [None] if no_mask else []
    for row, (real, _), agrees in zip(rows, split, agree, strict=True):
        if not agrees:
            _check_hidden(row, real, program)
            shown.append(real)
    were_shown = [
        session.key_mask.show(real, kv_len) for real in shown
    ]  # each widens what the next one finds
    if shows_padding := any(were_shown):
        session.requantize()
        agree = _hide_padding(session, split, kv_len)
    moves = not all(agree) or (session.masks_move and not ahead)
    if ahead and not fixed_length:
        moves = moves or _move_soon(session, part, args)
    session.masks_move = moves
    biases = [
        bias if agrees else hidden_bias(real, bias) for (real, bias), agrees in zip(split, agree, strict=True)
    ]
    seen = unknown if seen is None or moves else seen
    return StepMasks(session, part, args, biases, seen, shows_padding)


def _seen(session: Session, rows: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
    """`StepMasks.seen`; None where the host has to compare the masks."""
    assert session.batch is not None
    if session.steps is None or not session.steps.reads_masks:
        return None
    seen = [real_keys(row, session.batch) for row in rows]
    return None if any(real is None for real in seen) else seen


def _hide_padding(session: Session, split: Sequence[Split], kv_len: int) -> list[bool]:
    """Whether rows hide just the padding. Most do."""
    return [session.key_mask.agrees(real, kv_len) for real, _ in split]


def _move_soon(session: Session, part: PositionalPart, args: Sequence[Any]) -> bool:
    """Whether masks will hide more than the padding within a group of tokens, or that can't be known."""
    assert session.batch is not None
    group = session.config.group_size
    rows = _rows(session, part, args, group)
    split = [split_row(row, session.batch) for row in rows or ()]
    return rows is None or not all(_hide_padding(session, split, session.kv_len + 1 + group))


def _check_hidden(row: torch.Tensor, seen: torch.Tensor | None, program: Program) -> None:
    """SDPA gives 0 where a row has no key to see; an additive mask makes numbers of it that are the model's own."""
    if seen is not None and row.dtype != torch.bool and not bool(seen.any(-1).all()):
        site = next(site for site in program.sites if site.core.mask is not None and site.keys.window is None)
        raise UnsupportedGraphError(
            f"The mask of attention `{site.core.node.name}` ({site.source}) hides every key of a row. Give each row a"
            ' token that it sees, or compile this model with backend="inductor".'
        )


def read_windows(
    session: Session, part: PositionalPart, args: Sequence[Any], lanes: int, ahead: int
) -> dict[int, tuple[WindowMask | None, ...]]:
    """`DecodeStep.window_masks`: a layer with a window or chunks has a mask that moves with every token.

    It is as wide as the window, whatever the context. Lane 1's is None where it can't be told: Dynamo makes a graph of
    its own for the step in which a window fills up, and moved on it would ask for a token that is not there.
    """
    of_lanes = [_windows(session, part, args, lane * ahead) for lane in range(lanes)]
    return {
        layer: tuple(None if masks is None else masks[layer] for masks in of_lanes) for layer in part.layers
    }


def _windows(
    session: Session, part: PositionalPart, args: Sequence[Any], ahead: int
) -> dict[int, WindowMask] | None:
    """The masks of a token, by layer; None where they can't be told."""
    assert session.batch is not None
    shapes = {layer: session.shapes[layer] for layer in part.layers}
    if ahead and any(shape.window == session.kv_len + 1 for shape in shapes.values()):
        return None
    rows = part.ahead(args, ahead)
    widths = {layer: shape.tokens(session.kv_len + ahead) + 1 for layer, shape in shapes.items()}
    if rows is None or (
        ahead and any(rows[place].shape[-1] != widths[layer] for layer, place in part.layers.items())
    ):
        return None
    masks = [WindowMask.of(row, session.batch) for row in rows]
    return {layer: masks[place] for layer, place in part.layers.items()}

"""What a model's masks say while it decodes, compared with what the decode graph does without them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from specache_fx.errors import UnsupportedGraphError
from specache_fx.passes.base import PassState
from specache_fx.passes.sources import Sources
from specache_fx.runtime.masks import lane_bias, split_row
from specache_fx.runtime.session import Session


def check_masks(
    session: Session, state: PassState, args: Sequence[Any], ahead: bool
) -> list[torch.Tensor | None]:
    """Make sure that what the model's masks would hide is just the padding, now and for a group of tokens to come.

    The decode graph has no masks: it hides what the prompt's mask called padding and nothing else. A mask that hides
    more (a sliding window, a mask that the caller changed) or less must not be dropped silently.

    Args:
        session: The session.
        state: What the passes found.
        args: Dynamo's inputs.
        ahead: Look a group of tokens ahead as well: at the start and whenever a group fills.

    Returns:
        What the masks add to the scores of keys that they don't hide, one per result of `Sources.mask_graph`: see
        `masks.split_row`.

    Raises:
        UnsupportedGraphError: Names the attention.
    """
    sources = state.sources
    assert sources is not None and session.batch is not None
    site = next((site for site in state.sites if site.mask is None and site.window is None), None)
    if site is not None and session.key_mask.has_padding:
        raise UnsupportedGraphError(
            f"The prompt had padding, but attention `{site.node.name}` ({site.source}) has no mask in this step and"
            " would attend to it. Pass the prompt's attention_mask, extended by ones, in every step."
        )
    horizons = (0, session.config.group_size) if ahead and not sources.fixed_length else (0,)
    biases: list[torch.Tensor | None] = []
    for num_tokens in horizons:
        try:
            masks = sources.masks_at(args, num_tokens)
        except (IndexError, RuntimeError):
            if not num_tokens:
                raise
            break  # the model has no such position; the steps until then are checked one by one
        for mask in masks:
            seen, bias = split_row(mask, session.batch)
            if not num_tokens:
                biases.append(bias)
            if session.key_mask.agrees(seen, session.kv_len + 1 + num_tokens):
                continue
            site = next(site for site in state.sites if site.mask is not None and site.window is None)
            when = f"{num_tokens} tokens from now" if num_tokens else "now"
            raise UnsupportedGraphError(
                f"The mask of attention `{site.node.name}` ({site.source}) hides other keys than the prompt's padding"
                f" ({when}): a sliding window, or an attention_mask that changed after the prompt. Keep the"
                ' attention_mask as it was, extended by ones, or compile this model with backend="inductor".'
            )
    return biases


def step_biases(
    session: Session,
    sources: Sources,
    args: Sequence[Any],
    biases: Sequence[torch.Tensor | None],
    lanes: int,
    ahead: int,
) -> dict[int, torch.Tensor]:
    """What the model adds to each layer's scores in a step, by layer; see `DecodeInputs.bias`.

    Args:
        session: The session.
        sources: Of the decode graph.
        args: Dynamo's inputs.
        biases: Of the output token, from `check_masks`.
        lanes: Tokens of the step.
        ahead: Tokens from lane 0 to lane 1, 0 in pre-decode.
    """
    if all(bias is None for bias in biases):
        return {}
    assert session.batch is not None
    rows = [biases]
    if lanes > 1:
        following = biases  # also where the model has no further position: nothing will come of that lane
        if ahead:
            with contextlib.suppress(IndexError, RuntimeError):
                following = [split_row(mask, session.batch)[1] for mask in sources.masks_at(args, ahead)]
        rows.append(following)
    stacked = [lane_bias(list(row), session.kv_len, independent=not ahead) for row in zip(*rows, strict=True)]
    chosen = {layer: stacked[mask] for layer, mask in sources.layer_masks.items()}
    return {layer: bias for layer, bias in chosen.items() if bias is not None}

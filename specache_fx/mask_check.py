"""What a model's masks say while it decodes, compared with what the decode graph does without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specache_fx.errors import UnsupportedGraphError
from specache_fx.passes.base import PassState
from specache_fx.runtime.session import Session


def check_masks(session: Session, state: PassState, args: Sequence[Any], ahead: bool) -> None:
    """Make sure that what the model's masks would hide is just the padding, now and for a group of tokens to come.

    The decode graph has no masks: it hides what the prompt's mask called padding and nothing else. A mask that hides
    more (a sliding window, a mask that the caller changed) or less must not be dropped silently.

    Args:
        session: The session.
        state: What the passes found.
        args: Dynamo's inputs.
        ahead: Look a group of tokens ahead as well: at the start and whenever a group fills.

    Raises:
        UnsupportedGraphError: Names the attention.
    """
    sources = state.sources
    assert sources is not None and session.batch is not None
    site = next((site for site in state.sites if site.mask is None), None)
    if site is not None and session.key_mask.has_padding:
        raise UnsupportedGraphError(
            f"The prompt had padding, but attention `{site.node.name}` ({site.source}) has no mask in this step and"
            " would attend to it. Pass the prompt's attention_mask, extended by ones, in every step."
        )
    horizons = (0, session.config.group_size) if ahead and sources.knows_next else (0,)
    for num_tokens in horizons:
        for mask in sources.masks_at(args, num_tokens):
            if session.key_mask.agrees(mask, session.batch, session.kv_len + 1 + num_tokens):
                continue
            site = next(site for site in state.sites if site.mask is not None)
            when = f"{num_tokens} tokens from now" if num_tokens else "now"
            raise UnsupportedGraphError(
                f"The mask of attention `{site.node.name}` ({site.source}) hides other keys than the prompt's padding"
                f" ({when}): a sliding window, or an attention_mask that changed after the prompt. Keep the"
                ' attention_mask as it was, extended by ones, or compile this model with backend="inductor".'
            )

"""Law 7: a row's codes depend on its own real tokens alone, wherever the padding is and whatever its ids are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.compiled import EXACT, compiled
from support.models import TinyConfig, TinyDecoder
from support.oracle import OracleDecoder
from torch import Tensor

from specache_fx.config import SpecacheConfig

GROUP, STEPS = 8, 10
# A short period: n-grams of the text find followers.
TEXT = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(3)).repeat(1, 15)


def turns(padding: str, pads: int) -> list[Tensor]:
    """Masks of the turns before decoding, bool [2, q_len]; row 1 has half of row 0's padding."""
    left = torch.arange(20 + pads) >= torch.tensor([[pads], [pads // 2]])
    if padding == "middle":
        return [torch.ones(2, 17, dtype=torch.bool), left]  # a second turn, padded on its left
    return [left if padding == "left" else left.flip(1)]


def decoded(forward: Callable[..., Any], masks: list[Tensor], ids: Tensor) -> Tensor:
    """Logits of `STEPS` forced tokens, [2, STEPS, vocab_size]."""
    past, seen, at, logits = None, torch.ones(2, 0, dtype=torch.bool), 0, []
    with torch.no_grad():
        for mask in [*masks, *[torch.ones(2, 1, dtype=torch.bool)] * STEPS]:
            seen, start, at = torch.cat((seen, mask), dim=1), at, at + mask.shape[1]
            out, past = forward(ids[:, start:at], past=past, attention_mask=seen)
            logits.append(out[:, -1])
    return torch.stack(logits[len(masks) :], dim=1)


def oracles(model: TinyDecoder, config: SpecacheConfig, masks: list[Tensor], ids: Tensor) -> Tensor:
    oracle, at = OracleDecoder(model, config), 0
    for turn, mask in enumerate(masks):
        read = oracle.extend if turn else oracle.prefill
        read(ids[:, at : at + mask.shape[1]], mask)
        at += mask.shape[1]
    return torch.stack([oracle.decode(ids[:, at + step]).logits for step in range(STEPS)], dim=1)


@pytest.mark.parametrize("padding", ["left", "right", "middle"])
@pytest.mark.parametrize(
    "options",
    nightly_unless(
        lambda options: not options,
        [{}, {"quantizer": "kivi"}, {"quantizer": "zipcache"}, {"policy": "kivi"}],
    ),
    ids=str,
)
def test_padded_rows_equal_the_oracle_whatever_is_under_the_mask(
    padding: str, options: dict[str, str]
) -> None:
    """The oracle quantises the real tokens alone, and speculates by their ids alone."""
    model = TinyDecoder(TinyConfig(num_layers=1))
    config = SpecacheConfig(**{"bits": 2, "group_size": GROUP, "residual_length": 8, "top_k": 4, **options})
    forward = compiled(model, config)
    for pads in (0, 1, 7, 14) if options == {} else range(2 * GROUP + 1):
        masks = turns(padding, pads)
        real = torch.nn.functional.pad(torch.cat(masks, dim=1), (0, STEPS), value=True)
        text = TEXT[:, : real.shape[1]]  # padding that goes on as the text does
        truth = oracles(model, config, masks, text)
        ours = [decoded(forward, masks, ids) for ids in (text, text.where(real, 0), text.where(real, 1))]
        torch.testing.assert_close(ours[0], truth, **EXACT)
        assert torch.equal(ours[0], ours[1]) and torch.equal(ours[0], ours[2])


@pytest.mark.parametrize("how", ["decode", "extend"])
@pytest.mark.parametrize("quantizer", ["turboquant", "kivi"])
def test_keys_that_a_later_mask_shows_are_quantised_anew(how: str, quantizer: str) -> None:
    """A prompt hides its first tokens, and what follows attends to all: the codes are of a prompt that hid none."""
    model = TinyDecoder(TinyConfig(num_layers=1))
    config = SpecacheConfig(bits=2, group_size=GROUP, residual_length=8, top_k=4, quantizer=quantizer)
    forward, oracle = compiled(model, config), OracleDecoder(model, config)
    hidden = torch.arange(36) >= torch.tensor([[21], [3]])
    past, at = None, 36
    oracle.prefill(TEXT[:, :36], hidden)
    with torch.no_grad():
        _, past = forward(TEXT[:, :36], attention_mask=hidden)
        if how == "extend":
            for cache in oracle.caches:
                cache.key_mask = torch.ones_like(cache.key_mask)
            truth = oracle.extend(TEXT[:, 36:41])
            ours, past = forward(
                TEXT[:, 36:41], past=past, attention_mask=torch.ones(2, 41, dtype=torch.bool)
            )
            torch.testing.assert_close(ours, truth, **EXACT)
            at = 41
        for step in range(STEPS):
            mask = torch.ones(2, at + step + 1, dtype=torch.bool)
            if how == "decode" and step < 3:
                mask[:, :36] = hidden
            elif step == 3 and how == "decode":
                for cache in oracle.caches:
                    cache.key_mask = torch.ones_like(cache.key_mask)
                oracle._forget_lookahead()
            truth = oracle.decode(TEXT[:, at + step]).logits
            ours, past = forward(TEXT[:, at + step, None], past=past, attention_mask=mask)
            torch.testing.assert_close(ours[:, -1], truth, **EXACT)


def test_codes_without_originals_stay_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    config = SpecacheConfig(bits=2, group_size=GROUP, residual_length=8, policy="kivi")
    forward, real = compiled(model, config), (torch.arange(36) >= 21).expand(2, -1)
    with torch.no_grad(), caplog.at_level("WARNING", logger="specache_fx"):
        _, past = forward(TEXT[:, :36], attention_mask=real)
        forward(TEXT[:, 36:37], past=past, attention_mask=torch.ones(2, 37, dtype=torch.bool))
    (warning,) = (record.message for record in caplog.records)
    assert "policy='kivi' has no 16-bit pairs to quantise them anew" in warning

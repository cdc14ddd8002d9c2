"""On a CPU `lookahead="auto"` decodes one lane, and attention reads the pairs that weigh most by itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.open_sessions import session_of
from support.ways import EXACT, PADDED, REPEATS, own_loop
from support.zoo import SMALL, build
from torch import Tensor, nn

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 24


def compiled(name: str = "llama", **options: Any) -> nn.Module:
    model = build(name)
    small = {name: value for name, value in SMALL.items() if name != "top_k"}
    auto = {"lookahead": "auto", "bits": 2, "strict": True}
    model.compile(backend="specache", options={**small, **auto, **options})
    return model


@torch.no_grad()
def logits(model: nn.Module) -> tuple[Tensor, Any]:
    """Of padded rows, `STEPS` tokens; and the cache."""
    mask, ids = PADDED["attention_mask"], PADDED["input_ids"]
    forced = torch.randint(1, 100, (len(ids), STEPS), generator=torch.Generator().manual_seed(1))
    past, found = None, []
    for new in (ids, *forced.split(1, dim=1)):
        mask = mask if past is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out = model(new, attention_mask=mask, past_key_values=past, use_cache=True)
        past = out.past_key_values
        found.append(out.logits[:, -1])
    return torch.stack(found), past


@pytest.mark.parametrize(
    "name",
    nightly_unless(
        ("gemma2", "deepseek_v3", "gpt_oss").__contains__,
        ["llama", "gpt2", "gemma2", "deepseek_v3", "gpt_oss", "falcon"],
    ),
)
def test_a_share_of_0_gives_the_models_own_logits(name: str) -> None:
    """Softcap, sinks of the model, ALiBi, latent attention: each pair that is seen is read."""
    plain, _ = logits(build(name))
    ours, _ = logits(compiled(name, bits=1, key_share=0))
    torch.testing.assert_close(ours, plain, **EXACT)


def test_auto_on_a_cpu_guesses_nothing_and_stages_nothing() -> None:
    model = compiled()
    past = logits(model)[1]
    session, stats = session_of(past), specache_fx.stats(past)
    assert session.config.lookahead == "none" and session.transfer is None and session.table.serves
    assert stats.read_keys >= stats.read_values > 0 == stats.prefetched_rows == stats.prefetched_bytes
    assert (stats.exact_hit_rate, stats.topk_hit_rate) == (None, None)
    assert stats.total_bytes == stats.device_bytes + stats.host_bytes > stats.full_bytes
    options = {"lookahead": "auto"}
    shown = str(specache_fx.explain(build("llama"), options=options, input_ids=REPEATS["input_ids"]))
    assert "decode, 1 lane" in shown and "read in the same step" in shown and "prefetch" not in shown


@pytest.mark.parametrize(
    "options",
    nightly_unless(
        lambda options: "sink_tokens" in options or "aggregation" in options,
        [
            {},
            {"bits": 1, "sink_tokens": 3},
            {"aggregation": "max", "key_share": 0.05},
            {"resident_layers": 1},
        ],
    ),
    ids=str,
)
def test_the_one_operator_the_reference_and_another_order_agree(options: dict[str, Any]) -> None:
    # Shares that no pair is near to: rounding would decide there.
    shares = {"key_share": 0.0213, "value_share": 0.0571}
    ours, past = logits(compiled(**{**shares, **options}))
    torch._dynamo.reset()
    reference, other = logits(compiled(**{**shares, **options, "kernel": "reference"}))
    torch.testing.assert_close(ours, reference, **EXACT)
    counted = [specache_fx.stats(each) for each in (past, other)]
    assert counted[0].read_keys == counted[1].read_keys > 0
    assert counted[0].read_values == counted[1].read_values


def test_a_disk_is_a_bus(tmp_path: Path) -> None:
    past = logits(compiled(host="disk", host_dir=str(tmp_path)))[1]
    assert specache_fx.stats(past).exact_hit_rate is not None


def test_copies_crops_and_files_go_on_alike(tmp_path: Path) -> None:
    model = compiled()
    past = logits(model)[1]
    specache_fx.save(past, tmp_path)
    twin, loaded = copy.deepcopy(past), specache_fx.load(model, tmp_path)
    for each in (past, twin, loaded):
        each.crop(-11)
    token = torch.tensor([[5], [6], [7]])
    ours, theirs, read = (own_loop(model, token, 12, each) for each in (past, twin, loaded))
    assert torch.equal(ours, theirs) and torch.equal(ours, read)


def test_prefetched_pairs_are_corrected() -> None:
    """With a share of 0 nothing of the guess is left in the answer."""
    plain, _ = logits(build("llama"))
    ours, past = logits(compiled(lookahead="token", key_share=0, top_k=4))
    torch.testing.assert_close(ours, plain, **EXACT)
    stats = specache_fx.stats(past)
    assert stats.prefetched_rows > 0 < stats.read_keys and stats.exact_hit_rate is not None


def test_options_that_say_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    logits(compiled(top_k=128))
    assert "top_k=128 says nothing here" in caplog.text and 'lookahead="none"' in caplog.text

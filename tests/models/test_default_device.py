"""`torch.set_default_device`: the host's own tensors stay on the host, whatever the program's default is.

The default is "meta" here: what lands there by accident has no numbers, and the first reader fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models import TinyConfig, TinyDecoder, generate
from support.process import python

import specache_fx


@pytest.fixture(autouse=True)
def meta_by_default() -> Iterator[None]:
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TinyConfig(num_layers=1), {}),
        pytest.param(
            TinyConfig(), {"kernel": "reference", "sink_tokens": 2, "host": "disk"}, marks=pytest.mark.nightly
        ),
        pytest.param(
            TinyConfig(repeat_kv="expand", softcap=4.0), {"policy": "kivi"}, marks=pytest.mark.nightly
        ),
        pytest.param(
            TinyConfig(window=9, window_layers=(1,)), {"on_miss": "refetch"}, marks=pytest.mark.nightly
        ),
        pytest.param(
            TinyConfig(num_kv_heads=1, head_dim=16, latent_dim=12),
            {"kernel": "reference"},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["kernel", "reference", "eager_attention", "window", "latent"],
)
def test_decoding_is_the_same_under_another_default_device(config, options):
    model = TinyDecoder(config)
    prompt = torch.randint(1, config.vocab_size, (2, 21))
    given = {"lowering": "eager", "group_size": 4, "residual_length": 4, "top_k": 4, "bits": 2} | options
    wanted = generate(specache_fx.compile(model, **given), prompt, 12)
    torch.compiler.reset()
    again = TinyDecoder(config)
    torch.set_default_device("meta")
    compiled = specache_fx.compile(again, **given)
    found = generate(compiled, prompt, 12)
    copied = [(key.clone(), value.clone()) for key, value in found.past]
    torch.set_default_device(None)
    assert specache_fx.stats(found.past).kv_len == 32
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.logits, wanted.logits)
    if not options:  # copies and crops are found, too
        torch.set_default_device("meta")
        mask = torch.ones(2, 33, dtype=torch.bool, device="cpu")
        with torch.no_grad():
            compiled(prompt[:, :1], past=copied, attention_mask=mask)
            cropped = [(key[:, :, :15], value[:, :, :15]) for key, value in found.past]
            compiled(prompt[:, :1], past=cropped, attention_mask=mask[:, :16])


def test_a_saved_cache_is_the_same_under_another_default_device(tmp_path: Path) -> None:
    """In a process of its own, that imports under that default."""
    code = """
import sys, torch
torch.set_default_device("meta")
import specache_fx
from support.models import TinyConfig, TinyDecoder, generate
with torch.device("cpu"):
    model = TinyDecoder(TinyConfig(num_layers=1))
    prompt = torch.arange(1, 43).view(2, 21)
model = specache_fx.compile(model, lowering="eager", group_size=4, residual_length=4, top_k=4)
found = generate(model, prompt, 9)
ids = torch.cat([prompt, found.tokens], 1)[:, :29]
specache_fx.save(found.past, sys.argv[1], input_ids=ids)
store = specache_fx.PrefixStore(sys.argv[1] + "/store", 1 << 30)
store.put(ids, found.past)
loaded = specache_fx.load(model, sys.argv[1], input_ids=ids)
assert store.get(model, ids)[1] == 28
next_ids = found.tokens[:, -1:]
mask = torch.ones(2, 30, dtype=torch.bool, device="cpu")
with torch.no_grad():
    stayed, again = (model(next_ids, past=past, attention_mask=mask)[0] for past in (found.past, loaded))
assert torch.equal(stayed, again)
"""
    python("-c", code, str(tmp_path))

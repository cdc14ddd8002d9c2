"""`torch.set_default_device`: the host's own tensors stay on the host, whatever the program's default is.

The default is "meta" here: what lands there by accident has no numbers, and the first reader fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.models import TinyConfig, TinyDecoder, generate

import specache_fx


@pytest.fixture(autouse=True)
def meta_by_default() -> Iterator[None]:
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TinyConfig(), {}),
        (TinyConfig(), {"kernel": "reference", "sink_tokens": 2, "host": "disk"}),
        (TinyConfig(repeat_kv="expand", softcap=4.0), {"policy": "kivi"}),
        (TinyConfig(window=9, window_layers=(1,)), {"on_miss": "refetch"}),
        (TinyConfig(num_kv_heads=1, head_dim=16, latent_dim=12), {"kernel": "reference"}),
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
    found = generate(specache_fx.compile(again, **given), prompt, 12)
    torch.set_default_device(None)
    assert specache_fx.stats(found.past).kv_len == 32
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.logits, wanted.logits)


def test_handles_that_are_copied_and_cropped_are_found_under_another_default_device():
    config = TinyConfig()
    model = specache_fx.compile(
        TinyDecoder(config), lowering="eager", group_size=4, residual_length=4, top_k=4
    )
    prompt = torch.randint(1, config.vocab_size, (2, 21))
    torch.set_default_device("meta")
    past = generate(model, prompt, 9).past
    copied = tuple((key.clone(), value.clone()) for key, value in past)
    mask = torch.ones(2, 30, dtype=torch.bool, device="cpu")
    with torch.no_grad():
        model(prompt[:, :1], past=copied, attention_mask=mask)
        cropped = tuple((key[:, :, :15], value[:, :, :15]) for key, value in past)
        model(prompt[:, :1], past=cropped, attention_mask=mask[:, :16])

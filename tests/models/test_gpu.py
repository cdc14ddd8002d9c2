"""What only a GPU can show: the whole way of a call on it, its own memory, its own streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.ways import generate
from support.zoo import build

import specache_fx
from specache_fx.runtime.host.host_blocks import PinnedStore
from specache_fx.runtime.host.host_cache import HostCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SMALL = {"group_size": 16, "residual_length": 16, "top_k": 16}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.set_default_device(None)


def on_gpu(**options):
    """The plain model, and the same one compiled."""
    plain, compiled = build("llama").cuda(), build("llama").cuda()
    return plain, specache_fx.compile(compiled, **SMALL, **options)


def prompt() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_tokens_equal_the_plain_models_while_groups_fill(lowering):
    plain, compiled = on_gpu(bits=16, lowering=lowering)
    assert torch.equal(generate(compiled, prompt(), 80), generate(plain, prompt(), 80))


def test_tokens_of_beams_equal_the_plain_models():
    plain, compiled = on_gpu(bits=16, lowering="eager")
    assert torch.equal(
        generate(compiled, prompt(), 30, num_beams=3), generate(plain, prompt(), 30, num_beams=3)
    )


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_tokens_behind_a_crop_equal_the_plain_models(lowering):
    ids, found = prompt()["input_ids"][:1], []
    for model in on_gpu(bits=16, lowering=lowering):
        first = generate(model, {"input_ids": ids}, return_dict_in_generate=True)
        past = first.past_key_values
        past.crop(-10)
        again = torch.cat([first.sequences[:, : past.get_seq_length()], ids[:, :2]], 1)  # two others at once
        found.append(generate(model, {"input_ids": again}, past_key_values=past))
    assert torch.equal(*found)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_captured_steps_give_the_tokens_of_those_that_run_launch_by_launch(lowering):
    _, compiled = on_gpu(bits=2, lowering=lowering, replay=False)
    ran = generate(compiled, prompt(), 80)
    torch.compiler.reset()
    _, compiled = on_gpu(bits=2, lowering=lowering)
    out = generate(compiled, prompt(), 80, return_dict_in_generate=True)
    assert specache_fx.stats(out.past_key_values).replayed_steps > 20
    assert torch.equal(out.sequences, ran)


def test_low_bits_run_under_the_gpu_as_default_device():
    _, compiled = on_gpu(bits=2, lowering="eager", track_hit_rates="steps")
    torch.set_default_device("cuda")
    out = generate(compiled, prompt(), 80, return_dict_in_generate=True)
    stats = specache_fx.stats(out.past_key_values)
    assert stats.kv_len == 119 and 0 <= stats.topk_hit_rate <= 1
    assert len(stats.hit_series) == stats.steps


def test_pinned_rows_are_pinned_and_hold_what_the_device_sent():
    cache = HostCache(2, [(3, 8, 16)], torch.bfloat16, "pinned", block_tokens=64)
    key, value = torch.randn(2, 3, 300, 24, device="cuda").to(torch.bfloat16).split([8, 16], -1)
    cache.append(0, key[:, :, :100], value[:, :, :100])
    cache.append(0, key[:, :, 100:], value[:, :, 100:])
    assert all(part.is_pinned() for part in cache.parts(0))
    found = cache.read(0, 0, 300)
    assert torch.equal(found[0], key.cpu()) and torch.equal(found[1], value.cpu())
    cache.close()


def test_pinned_memory_that_was_given_back_can_be_pinned_again():
    for _ in range(3):
        block = PinnedStore(None).allocate((1 << 20,), torch.float32)
        assert block.is_pinned()
        assert torch.equal(block.fill_(2).cuda(), torch.full((1 << 20,), 2.0, device="cuda"))
        del block


def test_rows_that_are_to_be_saved_have_come_from_the_device():
    cache = HostCache(1, [(1, 8, 8)], torch.float32, "pinned")
    pairs = torch.ones(1, 1, 64, 8, device="cuda")
    cache.append(0, pairs, pairs)
    cache.truncate(0, 0)
    torch.cuda._sleep(1 << 30)  # the rows come behind it
    cache.append(0, pairs * 2, pairs * 2)
    assert all(bool((part == 2).all()) for part in cache.parts(0))
    cache.close()

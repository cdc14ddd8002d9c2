"""Slots planned and rows copied by the device's kernels, against the CPU's plan and the host's rows."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.triton_mode import DEVICE, needs_triton

from specache_fx.errors import SpecacheError
from specache_fx.runtime.host.host_blocks import resolve_host
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.transfer import (
    CpuTransfer,
    CudaTransfer,
    KernelTransfer,
    choose_transfer,
    plan_slots,
)

pytestmark = [needs_triton, pytest.mark.gpu]
BATCH, HEADS = 2, 2


def make_host(tokens: int, dtype: torch.dtype, dims: tuple[int, int]) -> tuple[HostCache, torch.Tensor]:
    """A host cache of one layer in several blocks, and its rows `[batch, heads, tokens, dim]`."""
    host = HostCache(BATCH, [(HEADS, *dims)], dtype, resolve_host("auto", DEVICE), block_tokens=64)
    rows = torch.randn(BATCH, HEADS, tokens, sum(dims), generator=torch.Generator().manual_seed(0)).to(dtype)
    for start in range(0, tokens, 70):
        part = rows[:, :, start : start + 70]
        host.append(0, part[..., : dims[0]], part[..., dims[0] :])
    return host, rows


def selection(rng: random.Random, top_k: int, tokens: int) -> torch.Tensor:
    rows = []
    for _ in range(BATCH * HEADS):
        chosen = rng.sample(range(tokens), rng.randint(0, min(top_k, tokens)))
        rows.append(rng.sample(chosen + [-1] * (top_k - len(chosen)), top_k))
    return torch.tensor(rows, dtype=torch.int32).view(BATCH, HEADS, top_k)


@settings(max_examples=8, deadline=None)
@given(
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    dims=st.sampled_from(((8, 8), (3, 4), (20, 12))),
    top_k=st.sampled_from((1, 5, 16)),
    spread=st.sampled_from((6, 150)),
    seed=st.integers(0, 999),
)
@example(dtype=torch.bfloat16, dims=(3, 4), top_k=70, spread=100, seed=0)  # several tiles of slots
def test_slots_are_the_cpus_plan_and_hold_the_hosts_rows(dtype, dims, top_k, spread, seed):
    host, rows = make_host(150, dtype, dims)
    transfer = choose_transfer(host, top_k, DEVICE, interpreted=True)
    rng = random.Random(seed)
    slots = torch.full((BATCH, HEADS, top_k), -1, dtype=torch.int32)
    came = stayed = 0
    for _ in range(3):
        wanted = selection(rng, top_k, min(spread, 150))
        plan = plan_slots(slots, wanted)
        slots, came, stayed = plan.slots, came + len(plan.slot_idx), stayed + plan.num_kept
        given_away = wanted.to(DEVICE, copy=True)
        transfer.prefetch(0, given_away)
        given_away.fill_(3)  # a compiled graph reuses its buffers at once
        staged, indices = transfer.wait(0)
        assert torch.equal(indices.cpu(), slots)
        at = slots.clamp(min=0).long()[..., None].expand(-1, -1, -1, sum(dims))
        there = (slots >= 0)[..., None]
        assert torch.equal(staged.cpu().where(there, 0), rows.gather(2, at).where(there, 0))
    metrics = transfer.metrics
    assert (metrics.fetched_rows, metrics.reused_rows) == (came, stayed)
    assert metrics.fetched_bytes == came * sum(dims) * dtype.itemsize
    transfer.close()


def test_rows_of_a_block_that_was_added_later_are_found_and_a_reset_empties_the_slots():
    host, rows = make_host(70, torch.float32, (4, 4))
    transfer = choose_transfer(host, 2, DEVICE, interpreted=True)
    wanted = torch.tensor([3, 69], dtype=torch.int32, device=DEVICE).expand(BATCH, HEADS, 2)
    transfer.prefetch(0, wanted)
    new = torch.randn(BATCH, HEADS, 100, 8)
    host.append(0, new[..., :4], new[..., 4:])
    transfer.prefetch(0, wanted + 60)
    staged, indices = transfer.wait(0)
    assert indices[0, 0].tolist() == [63, 129]
    assert torch.equal(staged[:, :, 0].cpu(), rows[:, :, 63])
    assert torch.equal(staged[:, :, 1].cpu(), new[:, :, 59])
    transfer.reset(0)
    assert (transfer.wait(0)[1] == -1).all()
    transfer.close()


def test_token_that_the_host_does_not_hold_is_left_out_and_reported_by_the_counters():
    host, rows = make_host(70, torch.float32, (4, 4))
    transfer = choose_transfer(host, 2, DEVICE, interpreted=True)
    wanted = torch.tensor([70, 5], dtype=torch.int32, device=DEVICE).expand(BATCH, HEADS, 2)
    transfer.prefetch(0, wanted)
    staged, indices = transfer.wait(0)
    assert indices[1, 1].tolist() == [5, -1]
    assert torch.equal(staged[1, 1, 0].cpu(), rows[1, 1, 5])
    with pytest.raises(SpecacheError, match="4 tokens were to be prefetched for layer 0"):
        _ = transfer.metrics
    transfer.close()


def test_device_copies_only_where_it_can_read_the_host():
    host, _ = make_host(10, torch.float32, (4, 4))
    usual, interpreted = (choose_transfer(host, 2, DEVICE, interpreted=flag) for flag in (False, True))
    assert type(usual) is (CudaTransfer if DEVICE.type == "cuda" else CpuTransfer)
    assert type(interpreted) is (CudaTransfer if DEVICE.type == "cuda" else KernelTransfer)
    usual.close()
    interpreted.close()

"""Every Triton kernel against what it has to equal, on the device and at real sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.run import Run
from specache_fx.config import SpecacheConfig
from specache_fx.runtime import triton_ops
from specache_fx.runtime.host_cache import HostCache, resolve_host
from specache_fx.runtime.kernels import DecodeInputs
from specache_fx.runtime.kernels.reference import ReferenceKernel
from specache_fx.runtime.kernels.triton_kernel import TritonKernel
from specache_fx.runtime.quant import make_quantizer, on_gpu
from specache_fx.runtime.select import count_overlap, select_topk
from specache_fx.runtime.transfer import KernelTransfer, plan_slots


def check_kernels(run: Run, found: dict[str, Any]) -> None:
    """Compare all of them; each has an entry with `ok`."""
    reason = triton_ops.unavailable_reason(run.device)
    found["triton"] = reason or ("interpreted" if triton_ops.interpreted() else "compiled")
    if reason is not None:
        return
    for name, check in (("attention", _attention), ("pack", _pack), ("select", _select), ("gather", _gather)):
        entry: dict[str, Any] = {}
        found[name] = entry
        entry["ok"] = run.attempt(entry, lambda check=check, entry=entry: check(run, entry)) and entry["ok"]  # type: ignore[misc]


def decode_inputs(
    run: Run,
    bits: int,
    tokens: int,
    generator: torch.Generator,
    batch: int = 2,
    quantizer: str = "turboquant",
) -> DecodeInputs:
    """Two lanes of a layer of Llama's shape (a small one where quick), with 64 staged rows and padding."""
    heads, kv_heads, dim, group, top_k = (4, 2, 16, 16, 8) if run.quick else (32, 8, 128, 64, 64)
    window = group + 5
    num_quantized = tokens // group * group

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(run.device, run.dtype)

    makes = make_quantizer(SpecacheConfig(bits=bits, group_size=group, quantizer=quantizer))
    key, value = random(batch, kv_heads, num_quantized, dim), random(batch, kv_heads, num_quantized, dim)
    order = torch.rand(batch, kv_heads, num_quantized, generator=generator).argsort(-1)[..., :top_k]
    at = order.to(run.device)[..., None].expand(-1, -1, -1, 2 * dim)
    mask = torch.ones(batch, num_quantized + window, dtype=torch.bool)
    mask[0, : group // 2] = False
    return DecodeInputs(
        query=random(2, batch, heads, 1, dim),
        key=random(2, batch, kv_heads, 1, dim),
        value=random(2, batch, kv_heads, 1, dim),
        quantizer=makes,
        key_planes=makes.quantize_key(key),
        value_planes=makes.quantize_value(value),
        num_quantized=num_quantized,
        window_rows=(random(batch, kv_heads, window, dim), random(batch, kv_heads, window, dim)),
        window_len=window,
        staged_rows=torch.cat([key, value], 3).gather(2, at),
        staged_indices=order.to(run.device, torch.int32),
        key_mask=mask.to(run.device),
        scale=dim**-0.5,
        independent_lanes=False,
    )


def _attention(run: Run, entry: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    entry["ok"] = True
    # A probability's relative error is that of its score: keys and scores of this size, a few ulps of float32 each.
    # float32: tanh is made of exp, whose error the softcap multiplies.
    tolerance = max(4 * torch.finfo(run.dtype).eps, 1e-5)
    for bits in (1, 2, 4, 8):
        tokens = 80 if run.quick else 8192
        inputs = decode_inputs(run, bits, tokens, generator)
        heads = inputs.query.shape[2]
        forms = {
            "plain": inputs,
            "kivi": decode_inputs(run, bits, tokens, generator, quantizer="kivi"),
            "softcap, sinks": replace(inputs, softcap=20.0, sinks=torch.randn(heads, device=run.device)),
        }
        for form, given in forms.items():
            out, scores = TritonKernel().attention(given)
            wanted, wanted_scores = ReferenceKernel().attention(given)
            size = wanted.float().abs().max().item()
            error = (out.float() - wanted.float()).abs().max().item() / size
            difference = (scores - wanted_scores).abs().max().item() / wanted_scores.max().item()
            ok = error <= tolerance and difference <= 1e-3
            entry[f"{bits} bit, {form}"] = {"out_error": error, "scores_error": difference, "ok": ok}
            entry["ok"] &= ok


def _pack(run: Run, entry: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    group, dim = (16, 16) if run.quick else (64, 128)
    entry["ok"] = True
    for bits in (1, 2, 4, 8):
        x = torch.randn(1, 2, 4 * group, dim, generator=generator).to(run.dtype)
        quantizer = make_quantizer(SpecacheConfig(bits=bits, group_size=group, quantizer="kivi"))
        for side, pack, quantize in (
            ("key", on_gpu.pack_keys, quantizer.quantize_key),
            ("value", on_gpu.pack_values, quantizer.quantize_value),
        ):
            planes = pack(x.to(run.device), bits, group)
            same = all(torch.equal(a.cpu(), b) for a, b in zip(planes, quantize(x), strict=True))
            entry[f"{bits} bit, {side}"] = same
            entry["ok"] &= same


def _select(run: Run, entry: dict[str, Any]) -> None:
    from specache_fx.runtime.select import triton_topk

    tokens, top_k, block = (100, 8, 32) if run.quick else (65536, 64, triton_topk.BLOCK)
    scores = torch.rand(2, 2, tokens, generator=torch.Generator().manual_seed(2)).mul(500).round().div(500)
    scores[0, :, ::3] = -1
    chosen = triton_topk.select_topk(scores.to(run.device), top_k, block).cpu()
    entry["ok"] = torch.equal(chosen, select_topk(scores, top_k))
    wanted = torch.zeros(2, 4, dtype=torch.float64)
    counts = wanted.to(run.device)
    count_overlap(scores, top_k, chosen.roll(1, 1), wanted)  # another head's
    triton_topk.count_overlap(scores.to(run.device), top_k, chosen.roll(1, 1).to(run.device), counts, block)
    entry["hit_rates_ok"] = torch.allclose(counts.cpu(), wanted)
    entry["ok"] &= entry["hit_rates_ok"]


def _gather(run: Run, entry: dict[str, Any]) -> None:
    tokens, top_k, dim = (200, 8, 16) if run.quick else (8192, 64, 128)
    host = HostCache(1, [(2, dim, dim)], run.dtype, resolve_host("auto", run.device))
    rows = torch.randn(1, 2, tokens, 2 * dim).to(run.dtype)
    host.append(0, rows[..., :dim], rows[..., dim:])
    copies, slots = KernelTransfer(host, top_k, run.device), torch.full((1, 2, top_k), -1, dtype=torch.int32)
    staging = copies.staging(0)
    entry["ok"] = True
    for seed in range(3):
        order = torch.rand(1, 2, top_k * 2, generator=torch.Generator().manual_seed(seed)).argsort(-1)
        wanted = order[..., :top_k].to(torch.int32)
        slots = plan_slots(slots, wanted).slots
        staging.wanted.copy_(wanted)
        copies.copy(0)
        at = slots.long()[..., None].expand(-1, -1, -1, 2 * dim)
        entry["ok"] &= torch.equal(staging.indices.cpu(), slots)
        entry["ok"] &= torch.equal(staging.rows.cpu(), rows.gather(2, at))
    host.close()

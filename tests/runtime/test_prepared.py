"""What the CPU kernel keeps of a layer from step to step changes no answer."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support.kernel_cases import KernelCase, make_inputs

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.kernels import DecodeInputs
from specache_fx.runtime.kernels.cpu import CpuKernel
from specache_fx.runtime.kernels.cpu.prepared import Prepared
from specache_fx.runtime.key_mask import KeyMask
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.layout import LayerShape
from specache_fx.runtime.quant import make_quantizer

CASE = KernelCase(groups=8, seed=1)


def fresh(inputs: DecodeInputs) -> DecodeInputs:
    return replace(inputs, memory={})


def changes() -> dict[str, dict[str, Any]]:
    """Inputs of a next step, by what is not as it was."""
    other = make_inputs(replace(CASE, seed=2))
    own = {name: getattr(other, name) for name in ("query", "key", "value")}
    masked = make_inputs(replace(CASE, masked="holes", bias="by_head"))
    halves: dict[str, Any] = {
        "num_quantized": 64,
        "staged_rows": None,
        "staged_indices": None,
        "key_planes": tuple(x[:, :, : x.shape[2] // 2] for x in other.key_planes),
    }
    halves["value_planes"] = tuple(x[:, :, : x.shape[2] // 2] for x in other.value_planes)
    return {
        "own": own,
        "planes": {"key_planes": other.key_planes, "value_planes": other.value_planes},
        "shorter": halves,
        "window": {"window_rows": other.window_rows},
        "window_len": {"window_len": 3},
        "staged": {"staged_rows": other.staged_rows, "staged_indices": other.staged_indices},
        "not staged": {"staged_rows": None, "staged_indices": None},
        "scale": {"scale": 0.5},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.randn(CASE.num_kv_heads * CASE.num_kv_groups)},
        "aggregation": {"aggregation": "max"},
        "scored": {"scored_lanes": 1},
        "independent": {"independent_lanes": True},
        "mask": {"key_mask": masked.key_mask},
        "bias": {"bias": masked.bias},
        "one lane": {name: value[:1] for name, value in own.items()},
    }


@pytest.mark.parametrize("name", changes())
def test_next_step_gets_the_answer_of_a_kernel_that_knows_nothing(name: str) -> None:
    kernel, first = CpuKernel(), make_inputs(CASE)
    second = replace(first, **changes()[name])
    assert first.memory is second.memory
    for inputs in (first, second, first):
        for got, wanted in zip(kernel.attention(inputs), kernel.attention(fresh(inputs)), strict=True):
            assert torch.equal(got, wanted)


def test_arguments_are_kept_where_only_the_step_is_another() -> None:
    kernel, inputs = CpuKernel(), make_inputs(CASE)
    kernel.attention(inputs)
    prepared = inputs.memory["cpu"]
    kernel.attention(replace(inputs, query=inputs.query.clone(), window_len=2))
    assert inputs.memory["cpu"] is prepared


def test_sinks_that_moved_are_read_where_they_are() -> None:
    kernel, inputs = CpuKernel(), make_inputs(KernelCase(sinks=True))
    assert inputs.sinks is not None
    inputs.sinks = torch.nn.Parameter(inputs.sinks, requires_grad=False)
    kernel.attention(inputs)
    inputs.sinks.data = inputs.sinks.data + 3
    got, wanted = kernel.attention(inputs), kernel.attention(fresh(inputs))
    assert all(map(torch.equal, got, wanted))


def test_planes_that_are_no_rows_are_copied_anew_in_each_step() -> None:
    kernel, inputs = CpuKernel(), make_inputs(CASE)
    inputs.window_rows = tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs.window_rows)
    kernel.attention(inputs)
    inputs.window_rows[0][:] = 0.5
    got, wanted = kernel.attention(inputs), kernel.attention(fresh(inputs))
    assert all(map(torch.equal, got, wanted))


def test_every_input_is_looked_at_or_given_anew() -> None:
    """A field that is added to the inputs has to be put somewhere."""
    looked_at = {"key_planes", "value_planes", "window_rows", "staged_rows", "staged_indices", "quantizer"}
    looked_at |= {"key_mask", "visible", "bias", "scale", "softcap", "aggregation"}
    given = {"query", "key", "value", "num_quantized", "window_len", "independent_lanes", "scored_lanes"}
    given |= {"sinks", "scores_out", "memory", "expand"}
    assert {field.name for field in fields(DecodeInputs)} == looked_at | given


def layer_cache(config: SpecacheConfig, batch: int) -> LayerCache:
    cpu, shape = torch.device("cpu"), LayerShape(2, 8, 8)
    return LayerCache(config, make_quantizer(config), shape, batch, torch.float32, cpu, None, 0, KeyMask())


def test_layer_forgets_what_kernels_kept_when_its_memory_changes() -> None:
    config = SpecacheConfig(bits=2, group_size=8, residual_length=8, policy="kivi")
    cache = layer_cache(config, batch=2)
    cache.append(torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8))
    planes = cache.planes
    assert cache.planes is planes  # the same tensors until they change
    for change in (
        lambda: cache.append(torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)),
        lambda: cache.take(cache, torch.tensor([1, 0])),
        lambda: cache.truncate(10),
    ):
        cache.kernel_memory["cpu"] = Prepared
        planes = cache.planes
        change()
        assert cache.kernel_memory == {}
        assert cache.planes is not planes


def test_view_of_planes_grows_and_shrinks_with_their_groups() -> None:
    config = SpecacheConfig(bits=2, group_size=8, residual_length=8, policy="kivi")
    cache = layer_cache(config, batch=1)
    cache.append(torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8))
    for _ in range(40):  # room is made by an eighth: most groups find it made
        cache.append(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
        groups = cache.num_quantized // config.group_size
        assert {plane.shape[2] % groups for planes in cache.planes for plane in planes} == {0}
        value = cache.quantizer.dequantize_value(cache.planes[1], 8, torch.float32)
        assert value.shape[2] == cache.num_quantized
    cache.truncate(100)
    assert cache.planes[1][0].shape[2] == cache.num_quantized

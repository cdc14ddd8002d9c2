"""The Triton launches of one layer's decode step, prepared for one arena and one form of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specache_fx.runtime.kernels.triton.arguments import (
    arguments_of,
    bias_of,
    merge_arguments,
    norms_of,
    parts_of,
)
from specache_fx.runtime.kernels.triton.kernel import attention_launches
from specache_fx.runtime.layers.layer_state import LayerCall, LayerState
from specache_fx.runtime.native.launches import Launch
from specache_fx.runtime.steps.stored_tokens import StoredTokens
from specache_fx.runtime.transfer import KernelTransfer


@dataclass(frozen=True)
class LayerLaunches:
    """A layer's launches, prepared for one arena and one form of a step.

    Attributes:
        arguments: Of all kernels, without those that differ from step to step.
        attention: Those of a step without biases, on the model's stream.
        selection: Chooses and brings the next step's pairs; None where all of them are on the device.
    """

    arguments: dict[str, Any]
    attention: tuple[Launch, ...]
    selection: Selection | None

    @property
    def own(self) -> list[torch.Tensor]:
        """Tensors that no other layer shares."""
        names = ["norm", *(("code_query",) if self.arguments["CENTRED"] else ())]
        names += [] if self.selection is None else ["kept_query", "kept_key"]
        return [self.arguments[name] for name in names]


@dataclass
class Selection:
    """The results of launches beside the model's stream.

    Attributes:
        scores: float32 `[lanes, batch, num_kv_heads, room]`: layers share it, for they select one after the other.
        selected: Results of each round of the selection.
        needed: The same of the output token's own selection, for the hit rates.
        before: The tokens that were staged for this step, int32 like `Staging.indices`.
        launches: Of a plain step, all of them; empty before the first.
    """

    scores: torch.Tensor
    selected: list[torch.Tensor]
    needed: list[torch.Tensor]
    before: torch.Tensor
    launches: Sequence[Launch] = ()


Shared = dict[tuple[Any, ...], Any]
"""Memory by name that all layers of a shape share: they run one after the other."""


def _of(shared: Shared, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """The piece of that name, made where there is none."""
    if key not in shared:
        shared[key] = make()
    return shared[key]


def prepare(
    layer: int,
    cache: LayerState,
    call: LayerCall,
    stored: StoredTokens,
    written: int,
    transfer: KernelTransfer | None,
    top_k: int,
    shared: Shared,
) -> LayerLaunches:
    """Prepare a layer.

    Args:
        layer: Its index.
        cache: Its cache, as large as it is.
        call: Its attention in the step that asks.
        stored: Lengths and masks of its tokens on the device.
        written: See `StepFacts`.
        transfer: Has its slots; None where nothing is selected.
        top_k: Slots of a row.
        shared: Memory of all layers.
    """
    from specache_fx.runtime.select import triton_topk

    # Stand-ins: prepared launches keep no activations.
    sides = {
        name: _of(shared, (name, *side.shape), functools.partial(torch.empty_like, side))
        for name, side in (("query", call.query), ("key", call.key), ("value", call.value))
    }
    call = replace(call, bias=None, **sides)
    staging = None if cache.is_exact or transfer is None else transfer.staging(layer)
    staged = None if call.independent_lanes or staging is None else (staging.rows, staging.indices)
    inputs = cache.inputs_at_any_length(replace(call, staged=staged))
    arguments = arguments_of(inputs, stored.lengths)
    if arguments["CENTRED"]:
        assert arguments["balance"].data_ptr() == inputs.key_planes[3].data_ptr(), "a copy would go stale"
    query = call.query
    lanes, batch, num_heads = query.shape[:3]
    heads, value_dim, splits = (arguments[name] for name in ("num_kv_heads", "VALUE_DIM", "splits"))
    arguments |= _of(
        shared,
        ("parts", lanes, batch, num_heads, splits, value_dim),
        lambda: parts_of(query, splits, value_dim),
    )
    if staging is None:
        arguments |= merge_arguments(inputs, arguments, written=written)
        arguments["norm"] = _of(shared, ("norm", batch, lanes, num_heads), lambda: norms_of(query))
        return LayerLaunches(arguments, attention_launches(arguments | bias_of(None, query)), None)
    kept = torch.empty_like(query), torch.empty_like(call.key)
    arguments |= merge_arguments(inputs, arguments, kept, written)
    arguments["norm"] = norms_of(query)
    scores = _of(
        shared,
        ("scores", lanes, batch, heads, stored.room),
        lambda: query.new_empty((lanes, batch, heads, stored.room + 1), dtype=torch.float32),
    )
    # A group that the step pushes out of the window is selectable.
    group_size = inputs.quantizer.group_size
    scores = scores[..., : min(inputs.num_quantized + group_size, stored.room)]
    shape = scores.shape[1:]
    between = [
        _of(shared, (name, *shape), lambda: triton_topk.rounds(scores[0], top_k))
        for name in ("selected", "needed")
    ]
    before = _of(shared, ("before", *staging.indices.shape), lambda: torch.empty_like(staging.indices))
    selection = Selection(scores, [*between[0][:-1], staging.wanted], between[1], before)
    return LayerLaunches(arguments, attention_launches(arguments | bias_of(None, query)), selection)

"""`DeviceSteps`: all of a layer's decode step as Triton launches that are the same at every length.

    stream of the model:  rotate queries -> parts of attention -> their sum, which appends lane 0's pair
    beside it:            selection scores -> top-k -> plan the slots -> copy their rows -> hit rates

`specache::device_step` launches them. What changes from step to step is in the device's memory, at addresses that stay:
lengths, shares, the padding, and copies of the queries for what runs beside. Grids are cut for what the arenas have
room for. So a step can be captured as a CUDA graph, and replayed until a tensor moves (`generation`).

Paper: SpeCache Alg. 3. On the CPU `StepTable` does the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from specache_fx.runtime import triton_ops
from specache_fx.runtime.kernels import Kernel
from specache_fx.runtime.kernels.triton_arguments import (
    arguments_of,
    bias_of,
    cut_keys,
    length_class,
    merge_arguments,
    parts_of,
    taken_by,
    tokens_told,
)
from specache_fx.runtime.kernels.triton_kernel import TritonKernel
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.layer_state import LayerCall
from specache_fx.runtime.layout import LayerTensors
from specache_fx.runtime.quant import Quantizer
from specache_fx.runtime.select.topk import MOST_IN_A_KERNEL
from specache_fx.runtime.tracing import span
from specache_fx.runtime.transfer import KernelTransfer, Transfer
from specache_fx.runtime.whole_steps import StepFacts

_NUM_QUANTIZED, _NUM_SELECTABLE = 0, 2  # of `lengths`: see `tell_lengths`


@dataclass(frozen=True)
class _Layer:
    """A layer's launches, prepared for one arena and one form of a step.

    Attributes:
        arguments: Of all kernels, but for what differs from step to step.
        norm: What `merge_parts` leaves for the scores.
        scores: float32 `[lanes, batch, num_kv_heads, room]`: layers share it, for they select one after the other.
        selected: What each round of the selection leaves.
        needed: The same of the output token's own selection, for the hit rates.
        before: The tokens that were staged for this step, int32 like `Staging.indices`.
    """

    arguments: dict[str, Any]
    norm: torch.Tensor
    scores: torch.Tensor
    selected: list[torch.Tensor]
    needed: list[torch.Tensor]
    before: torch.Tensor


class DeviceSteps:
    """The launches of one session.

    Args:
        device: Where it is.
        top_k: Slots of a row.
        transfer: Brings the rows.

    Attributes:
        device: Where it is.
        kernel: See `WholeSteps`.
        generation: Another number when a tensor lies elsewhere than before: what was captured then is void.
    """

    kernel = "triton"

    def __init__(self, device: torch.device, top_k: int, transfer: KernelTransfer) -> None:
        self.device, self._top_k, self._transfer = device, top_k, transfer
        self.generation = 0
        self._layers: dict[tuple[Any, ...], _Layer] = {}
        self._arenas: dict[int, weakref.ref[LayerTensors]] = {}  # that the layers above were prepared for
        self._shared: dict[tuple[Any, ...], Any] = {}  # what layers of one shape share
        with torch.inference_mode(False):
            self._lengths = torch.zeros(3, dtype=torch.int32, device=device)
        self._shares: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None  # bool `[batch, room]`
        self._mask_told: torch.Tensor | None = None  # what was written to it last
        # Of the step under way.
        self._facts: StepFacts | None = None
        self._caches: Mapping[int, LayerCache] = {}
        self._fills = False
        self._run: list[int] = []

    @classmethod
    def of(
        cls, kernel: Kernel, quantizer: Quantizer, transfer: Transfer | None, top_k: int, device: torch.device
    ) -> DeviceSteps | None:
        """The steps of a session, or None where these launches can't serve it."""
        if not isinstance(kernel, TritonKernel) or quantizer.code_form is None:
            return None
        if not isinstance(transfer, KernelTransfer) or top_k > MOST_IN_A_KERNEL:
            return None
        return cls(device, top_k, transfer)

    def tell(self, layers: Mapping[int, LayerCache], facts: StepFacts) -> None:
        """See `WholeSteps`. What ran beside the step before is through for the current stream."""
        from specache_fx.runtime.kernels.triton_lengths import tell_lengths

        first = next(iter(layers.values()))
        num_quantized = first.num_quantized
        selectable = num_quantized if facts.predecodes else first.num_quantized_at(first.kv_len + 1)
        self._fills = selectable != num_quantized
        self._facts, self._caches, self._run = facts, layers, []
        moved = [i for i, cache in layers.items() if self._lies_elsewhere(i, cache)]
        moved += [i for i in layers if self._transfer.update_table(i)]
        with torch.inference_mode(False):
            if moved:
                self._forget()
            self._tell_mask(facts.key_mask.real, first)
            self._shares = self._told(self._shares, facts.shares)
            if facts.counts is not None:
                self._tell_counts(facts.counts)
        with triton_ops.on(self.device):
            tell_lengths[(1,)](self._lengths, num_quantized, first.window_len, selectable)

    def _lies_elsewhere(self, index: int, cache: LayerCache) -> bool:
        known = self._arenas.get(index)
        if known is not None and known() is cache.tensors:
            return False
        self._arenas[index] = weakref.ref(cache.tensors)
        return True

    def _forget(self) -> None:
        """What was prepared is void."""
        self.generation += 1
        self._layers.clear()
        self._shared.clear()

    def _told(self, kept: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor | None:
        """Have `value` where the launches read it; without one what is there stays."""
        if value is None:
            return kept
        if kept is None or kept.shape != value.shape:
            self._forget()
            return value.clone()
        return kept.copy_(value)

    def _tell_counts(self, counts: torch.Tensor) -> None:
        """Count from 0 where the launches count; `end` adds it to `counts`."""
        if self._counts is None or self._counts.shape != counts.shape:
            self._forget()
            self._counts = torch.empty_like(counts)
        self._counts.zero_()

    def _tell_mask(self, real: torch.Tensor | None, cache: LayerCache) -> None:
        if real is None:
            return
        shape = (real.shape[0], cache.room)
        if self._mask is None or self._mask.shape != shape:
            self._forget()
            self._mask, self._mask_told = torch.ones(shape, dtype=torch.bool, device=self.device), None
        if real is not self._mask_told:
            self._mask[:, : real.shape[1]] = real
            self._mask[:, real.shape[1] :] = True
            self._mask_told = real

    @property
    def is_plain(self) -> bool:
        """Whether the step that was told launches what most do: it decodes, no group fills, no mask moves."""
        facts = self._facts
        if facts is None or self._fills:
            return False
        return not (facts.predecodes or facts.biases or facts.missed is not None)

    @property
    def form(self) -> tuple[Any, ...]:
        """Of the step that was told: where it and `generation` are the same, so are the launches."""
        facts = self._facts
        assert facts is not None
        told = (part is None for part in (facts.shares, facts.key_mask.real, facts.counts))
        return (facts.predecodes, facts.scored_lanes, *told)

    def launch(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All of a layer's step; shapes as in `DecodeStep.attend`.

        Returns:
            `[lanes, batch, num_heads, 1, value_dim]`.
        """
        facts, cache, transfer = self._facts, self._caches.get(layer), self._transfer
        if facts is None or cache is None or layer in self._run:
            raise RuntimeError(f"layer {layer} is not to run now")
        self._run.append(layer)
        query, key, value = (side.contiguous() for side in (query, key, value))
        call = LayerCall(
            query=query,
            key=key,
            value=value,
            scale=scale,
            independent=facts.predecodes,
            softcap=softcap,
            sinks=sinks,
            expand=None,
            staged=None,
            key_mask=self._mask if facts.key_mask.has_padding else None,
            bias=facts.biases.get(layer),
            scored_lanes=facts.scored_lanes,
            window_masks=(),
        )
        prepared = self._layers.get((layer, *self.form))
        if prepared is None:
            with torch.inference_mode(False):
                prepared = self._layers[(layer, *self.form)] = self._prepare(layer, call)
        own = {"query": query, "own_key": key, "own_value": value}
        arguments = prepared.arguments | own | bias_of(call.bias, query)
        arguments["sinks"] = triton_ops.pointer_or(sinks, query)
        with triton_ops.on(self.device):
            with span("attention", device=self.device, layer=layer):
                out = self._attend(arguments, prepared)
            with transfer.beside(layer), span("select", "copies", device=self.device, layer=layer):
                self._select(layer, arguments, prepared)
        return out

    def _attend(self, arguments: dict[str, Any], prepared: _Layer) -> torch.Tensor:
        from specache_fx.runtime.kernels.triton_decode import partial_attention
        from specache_fx.runtime.kernels.triton_merge import merge_parts, rotate_queries

        query = arguments["query"]
        lanes, batch, num_heads = query.shape[:3]
        out = query.new_empty((lanes, batch, num_heads, 1, arguments["VALUE_DIM"]))
        if arguments["CENTRED"]:
            rotate_queries[(lanes * batch * num_heads,)](
                out=arguments["code_query"], **taken_by(rotate_queries, arguments)
            )
        grid = (batch * arguments["num_kv_heads"], arguments["splits"], arguments["TILES"])
        partial_attention[grid](**taken_by(partial_attention, arguments))
        merge_parts[(batch * lanes * num_heads,)](
            out=out, norm=prepared.norm, **taken_by(merge_parts, arguments)
        )
        return out

    def _select(self, layer: int, arguments: dict[str, Any], prepared: _Layer) -> None:
        """Choose the next step's pairs and bring them; reads nothing that the model may overwrite meanwhile."""
        from specache_fx.runtime.kernels.triton_scores import selection_scores
        from specache_fx.runtime.select import triton_topk

        facts, transfer = self._facts, self._transfer
        assert facts is not None
        kept = {"query": arguments["kept_query"], "own_key": arguments["kept_key"]}
        if not arguments["CENTRED"]:
            kept["code_query"] = kept["query"]
        scores, staging = prepared.scores, transfer.staging(layer)
        grid = (arguments["batch"] * arguments["num_kv_heads"], arguments["splits"])
        selection_scores[grid](out=scores, norm=prepared.norm, **taken_by(selection_scores, arguments | kept))
        triton_topk.select_topk(
            scores[-1],
            self._top_k,
            other=None if facts.shares is None else scores[0],
            shares=None if facts.shares is None else self._shares,
            told=self._lengths[_NUM_SELECTABLE:],
            out=prepared.selected,
        )
        if facts.missed is not None:
            torch.where(facts.missed[:, None, None], staging.wanted, staging.indices, out=staging.wanted)
        if facts.counts is not None:
            prepared.before.copy_(staging.indices)  # the copy overwrites which tokens are staged
        num_quantized = self._lengths[_NUM_QUANTIZED:]
        if not self._fills:
            transfer.copy(layer, num_quantized)
        if facts.counts is not None:
            assert self._counts is not None
            triton_topk.count_overlap(
                scores[0], self._top_k, prepared.before, self._counts, told=num_quantized, out=prepared.needed
            )

    def _prepare(self, index: int, call: LayerCall) -> _Layer:
        from specache_fx.runtime.select import triton_topk

        facts, cache, transfer = self._facts, self._caches[index], self._transfer
        assert facts is not None
        staging = transfer.staging(index)
        staged = None if facts.predecodes else (staging.rows, staging.indices)
        inputs = cache.inputs_at_any_length(replace(call, staged=staged))
        arguments = arguments_of(inputs)
        if arguments["CENTRED"]:
            assert arguments["balance"].data_ptr() == inputs.key_planes[3].data_ptr(), "a copy would go stale"
        query, room = call.query, cache.room
        lanes, batch, num_heads = query.shape[:3]
        heads, value_dim = arguments["num_kv_heads"], arguments["VALUE_DIM"]
        rows = arguments["top_k"] + inputs.window_len + lanes
        arguments |= cut_keys(inputs.num_quantized, rows, batch * heads, self.device)
        arguments["length_class"] = length_class(arguments["code_tokens"])
        arguments |= tokens_told(self._lengths, query, room)
        splits = arguments["splits"]
        arguments |= self._of_shape(
            ("parts", lanes, batch, num_heads, splits, value_dim), lambda: parts_of(query, splits, value_dim)
        )
        kept = torch.empty_like(query), torch.empty_like(call.key)
        arguments |= merge_arguments(inputs, arguments, kept, appends=not facts.predecodes)
        scores = self._of_shape(
            ("scores", lanes, batch, heads, room),
            lambda: query.new_empty((lanes, batch, heads, room + 1), dtype=torch.float32),
        )
        # A group that the step pushes out of the window is selectable.
        scores = scores[..., : min(inputs.num_quantized + cache.config.group_size, room)]
        shape = scores.shape[1:]
        between = [
            self._of_shape((name, *shape), lambda: triton_topk.rounds(scores[0], self._top_k))
            for name in ("selected", "needed")
        ]
        return _Layer(
            arguments=arguments,
            norm=query.new_empty((batch, lanes, num_heads), dtype=torch.float32),
            scores=scores,
            selected=[*between[0][:-1], staging.wanted],
            needed=between[1],
            before=self._of_shape(
                ("before", *staging.indices.shape), lambda: torch.empty_like(staging.indices)
            ),
        )

    def _of_shape(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def end(self) -> tuple[list[int], bool]:
        """See `WholeSteps`."""
        facts, run, late = self._facts, self._run, self._fills
        self._facts, self._caches, self._run = None, {}, []
        if facts is None:
            return run, late
        if facts.biases or facts.missed is not None or facts.counts is not None:
            self._transfer.join()  # they are read beside, and the caller may drop them
        if facts.counts is not None:
            assert self._counts is not None
            facts.counts.add_(self._counts)
        return run, late

    def restart(self) -> None:
        """Have the layers of the step that was told run, though some seemed to: a capture launches nothing."""
        self._run = []

    def replayed(self) -> None:
        """Note that what was captured has run: all layers of the step."""
        self._run = list(self._caches)

    def check(self, error: RuntimeError) -> None:
        """See `WholeSteps`: torch's own errors say what they are."""

    @property
    def device_bytes(self) -> int:
        """See `WholeSteps`."""
        own = [self._lengths, self._shares, self._counts, self._mask]
        nbytes = {tensor.data_ptr(): tensor.nbytes for tensor in own if tensor is not None}
        leaves = tree_leaves(list(self._shared.values()))
        for layer in self._layers.values():
            names = ("kept_query", "kept_key", *(("code_query",) if layer.arguments["CENTRED"] else ()))
            leaves += [layer.norm, *(layer.arguments[name] for name in names)]
        nbytes |= {leaf.data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}
        return sum(nbytes.values())

    def close(self) -> None:
        """See `WholeSteps`."""
        self._forget()
        self._arenas.clear()
        self._shares = self._counts = self._mask = self._mask_told = None

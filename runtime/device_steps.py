"""`DeviceSteps`: all of a layer's decode step as Triton launches that are the same at every length.

    stream of the model:  rotate queries -> parts of attention -> their sum, which appends lane 0's pair
    beside it:            selection scores -> top-k -> plan the slots -> copy their rows -> hit rates

`specache::device_step` launches them. What changes from step to step is in the device's memory, at addresses that stay:
lengths, shares, the padding, and copies of the queries for what runs beside. Grids are cut for what the arenas have
room for. So a step can be captured as a CUDA graph, and replayed until a tensor moves (`generation`).

Paper: SpeCache Alg. 3. On the CPU `StepTable` does the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
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
from specache_fx.runtime.launches import Launch, launch, noted
from specache_fx.runtime.layer_state import LayerCall, LayerState
from specache_fx.runtime.layout import LayerTensors
from specache_fx.runtime.quant import Quantizer
from specache_fx.runtime.select.topk import MOST_IN_A_KERNEL
from specache_fx.runtime.tracing import span
from specache_fx.runtime.transfer import KernelTransfer, Transfer
from specache_fx.runtime.whole_steps import StepFacts

_NUM_QUANTIZED, _NUM_SELECTABLE = 0, 2  # of `lengths`: see `tell_lengths`


@dataclass
class _Stored:
    """What the device knows of the stored tokens of layers that have the same ones.

    Attributes:
        room: Tokens that there is room for.
        lengths: See `tell_lengths`.
        mask: Bool `[batch, room]`: which are real; None where nobody asks.
        told: What was written to it last.
        visible: Bool `[lanes, batch, room + lanes]`, see `StepFacts`; None but for windows.
    """

    room: int
    lengths: torch.Tensor
    mask: torch.Tensor | None = None
    told: torch.Tensor | None = None
    visible: torch.Tensor | None = None


@dataclass(frozen=True)
class _Layer:
    """A layer's launches, prepared for one arena and one form of a step.

    Attributes:
        arguments: Of all kernels, but for what differs from step to step.
        attention: Those of a step without biases, on the model's stream.
        selection: What chooses and brings the next step's pairs; None where all of them are on the device.
    """

    arguments: dict[str, Any]
    attention: tuple[Launch, ...]
    selection: _Selection | None


@dataclass
class _Selection:
    """Where the launches beside the model's stream write to.

    Attributes:
        scores: float32 `[lanes, batch, num_kv_heads, room]`: layers share it, for they select one after the other.
        selected: What each round of the selection leaves.
        needed: The same of the output token's own selection, for the hit rates.
        before: The tokens that were staged for this step, int32 like `Staging.indices`.
        launches: Of a plain step, all of them; empty before the first.
    """

    scores: torch.Tensor
    selected: list[torch.Tensor]
    needed: list[torch.Tensor]
    before: torch.Tensor
    launches: Sequence[Launch] = ()


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
        self._stored: dict[int, _Stored] = {}  # by the first layer of those that are alike
        self._alike: dict[int, int] = {}
        self._tables_moved = 0
        self._shares: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        # Of the step under way.
        self._facts: StepFacts | None = None
        self._caches: Mapping[int, LayerState] = {}
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

    def tell(self, layers: Mapping[int, LayerState], facts: StepFacts) -> None:
        """See `WholeSteps`. What ran beside the step before is through for the current stream."""
        self._fills = facts.num_selectable != facts.num_quantized
        self._facts, self._caches, self._run = facts, layers, []
        moved = [i for i, cache in layers.items() if self._lies_elsewhere(i, cache)]
        for i, cache in layers.items():
            if not cache.is_exact:
                self._transfer.update_table(i)
        with torch.inference_mode(False):
            # A table may have moved since the last step: rows of a group that this filled were brought.
            if moved or self._transfer.tables_moved != self._tables_moved or facts.alike != self._alike:
                self._forget()
            self._tables_moved = self._transfer.tables_moved
            self._alike = dict(facts.alike)
            for layer in dict.fromkeys(facts.alike.values()):
                self._tell_stored(layer, facts)
            self._shares = self._told(self._shares, facts.shares)
            if facts.counts is not None:
                self._tell_counts(facts.counts)

    def _tell_stored(self, layer: int, facts: StepFacts) -> None:
        """Write what the device knows of the stored tokens of `layer`, and of others like it."""
        from specache_fx.runtime.kernels.triton_lengths import tell_lengths

        cache, stored = self._caches[layer], self._stored.get(layer)
        if stored is None or stored.room != cache.room:
            self._forget()
            lengths = torch.zeros(3, dtype=torch.int32, device=self.device)
            stored = self._stored[layer] = _Stored(cache.room, lengths)
        num_selectable = 0 if cache.is_exact else facts.num_selectable
        with triton_ops.on(self.device):
            tell_lengths[(1,)](stored.lengths, cache.num_quantized, cache.window_len, num_selectable)
        visible, real = facts.visible.get(layer), facts.key_mask.real
        if visible is not None:
            shape = (*visible.shape[:2], stored.room + visible.shape[0])
            if stored.visible is None or stored.visible.shape != shape:
                self._forget()
                stored.visible = torch.zeros(shape, dtype=torch.bool, device=self.device)
            stored.visible[..., : visible.shape[2]] = visible
        elif real is not None:
            if stored.mask is None:
                self._forget()
                stored.mask = torch.ones((len(real), stored.room), dtype=torch.bool, device=self.device)
            if real is not stored.told:
                stored.mask[:, : real.shape[1]] = real
                stored.mask[:, real.shape[1] :] = True
                stored.told = real

    def _lies_elsewhere(self, index: int, cache: LayerState) -> bool:
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
        stored = self._stored[self._alike[layer]]
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
            key_mask=stored.mask if facts.key_mask.has_padding else None,
            bias=facts.biases.get(layer),
            scored_lanes=facts.scored_lanes,
            visible=stored.visible,
        )
        key_of_form = (layer, query.shape[0], *self.form)
        prepared = self._layers.get(key_of_form)
        if prepared is None:
            with torch.inference_mode(False):
                prepared = self._layers[key_of_form] = self._prepare(layer, call)
        with triton_ops.on(self.device):
            with span("attention", device=self.device, layer=layer):
                out = self._attend(prepared, call)
            if prepared.selection is not None:
                with transfer.beside(layer), span("select", "copies", device=self.device, layer=layer):
                    self._select(layer, prepared.arguments, prepared.selection, call.bias)
        return out

    def _attend(self, prepared: _Layer, call: LayerCall) -> torch.Tensor:
        query, own = call.query, {"own_key": call.key, "own_value": call.value}
        out = query.new_empty((*query.shape[:4], prepared.arguments["VALUE_DIM"]))
        launches = prepared.attention
        if call.bias is not None:
            launches = _attention(prepared.arguments | bias_of(call.bias, query))
        *rotations, parts, merge = launches
        for rotation in rotations:
            rotation(query=query)
        parts(query=query, **own)
        merge(out=out, query=query, sinks=triton_ops.pointer_or(call.sinks, query), **own)
        return out

    def _select(
        self, layer: int, arguments: dict[str, Any], prepared: _Selection, bias: torch.Tensor | None
    ) -> None:
        """Choose the next step's pairs and bring them; reads nothing that the model may overwrite meanwhile."""
        facts = self._facts
        assert facts is not None
        if facts.counts is not None:
            # The copy overwrites which tokens are staged.
            prepared.before.copy_(self._transfer.staging(layer).indices)
        if self.is_plain and prepared.launches:
            for one in prepared.launches:
                one()
            return
        with noted() as launches:
            self._launch_selection(layer, arguments | bias_of(bias, arguments["query"]), prepared)
        if self.is_plain:
            prepared.launches = launches

    def _launch_selection(self, layer: int, arguments: dict[str, Any], prepared: _Selection) -> None:
        from specache_fx.runtime.kernels.triton_scores import selection_scores
        from specache_fx.runtime.select import triton_topk

        facts, transfer, lengths = self._facts, self._transfer, arguments["lengths"]
        assert facts is not None
        kept = {"query": arguments["kept_query"], "own_key": arguments["kept_key"]}
        if not arguments["CENTRED"]:
            kept["code_query"] = kept["query"]
        scores, staging = prepared.scores, transfer.staging(layer)
        grid = (arguments["batch"] * arguments["num_kv_heads"], arguments["splits"])
        launch(selection_scores, grid, **(taken_by(selection_scores, arguments | kept) | {"out": scores}))
        triton_topk.select_topk(
            scores[-1],
            self._top_k,
            other=None if facts.shares is None else scores[0],
            shares=None if facts.shares is None else self._shares,
            told=lengths[_NUM_SELECTABLE:],
            out=prepared.selected,
        )
        if facts.missed is not None:
            torch.where(facts.missed[:, None, None], staging.wanted, staging.indices, out=staging.wanted)
        num_quantized = lengths[_NUM_QUANTIZED:]
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
        # Stand-ins: what is prepared keeps no activations.
        sides = {
            name: self._of_shape((name, *side.shape), functools.partial(torch.empty_like, side))
            for name, side in (("query", call.query), ("key", call.key), ("value", call.value))
        }
        call = replace(call, bias=None, **sides)
        staging = None if cache.is_exact else transfer.staging(index)
        staged = None if facts.predecodes or staging is None else (staging.rows, staging.indices)
        inputs = cache.inputs_at_any_length(replace(call, staged=staged))
        arguments = arguments_of(inputs)
        if arguments["CENTRED"]:
            assert arguments["balance"].data_ptr() == inputs.key_planes[3].data_ptr(), "a copy would go stale"
        query, stored = call.query, self._stored[self._alike[index]]
        lanes, batch, num_heads = query.shape[:3]
        heads, value_dim = arguments["num_kv_heads"], arguments["VALUE_DIM"]
        rows = arguments["top_k"] + inputs.window_len + lanes
        arguments |= cut_keys(inputs.num_quantized, rows, batch * heads, self.device)
        arguments["length_class"] = length_class(arguments["code_tokens"])
        arguments |= tokens_told(stored.lengths, query, stored.room)
        splits = arguments["splits"]
        arguments |= self._of_shape(
            ("parts", lanes, batch, num_heads, splits, value_dim), lambda: parts_of(query, splits, value_dim)
        )
        appends = not facts.predecodes
        if staging is None:
            arguments |= merge_arguments(inputs, arguments, appends=appends)
            arguments["norm"] = self._of_shape(("norm", batch, lanes, num_heads), lambda: _norms(query))
            return _Layer(arguments, _attention(arguments | bias_of(None, query)), None)
        kept = torch.empty_like(query), torch.empty_like(call.key)
        arguments |= merge_arguments(inputs, arguments, kept, appends=appends)
        arguments["norm"] = _norms(query)
        scores = self._of_shape(
            ("scores", lanes, batch, heads, stored.room),
            lambda: query.new_empty((lanes, batch, heads, stored.room + 1), dtype=torch.float32),
        )
        # A group that the step pushes out of the window is selectable.
        group_size = inputs.quantizer.group_size
        scores = scores[..., : min(inputs.num_quantized + group_size, stored.room)]
        shape = scores.shape[1:]
        between = [
            self._of_shape((name, *shape), lambda: triton_topk.rounds(scores[0], self._top_k))
            for name in ("selected", "needed")
        ]
        before = self._of_shape(("before", *staging.indices.shape), lambda: torch.empty_like(staging.indices))
        selection = _Selection(scores, [*between[0][:-1], staging.wanted], between[1], before)
        return _Layer(arguments, _attention(arguments | bias_of(None, query)), selection)

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
        own = [self._shares, self._counts]
        for stored in self._stored.values():
            own += [stored.lengths, stored.mask, stored.visible]
        nbytes = {tensor.data_ptr(): tensor.nbytes for tensor in own if tensor is not None}
        leaves = tree_leaves(list(self._shared.values()))
        for layer in self._layers.values():
            names = ["norm", *(("code_query",) if layer.arguments["CENTRED"] else ())]
            names += [] if layer.selection is None else ["kept_query", "kept_key"]
            leaves += [layer.arguments[name] for name in names]
        nbytes |= {leaf.data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}
        return sum(nbytes.values())

    def close(self) -> None:
        """See `WholeSteps`."""
        self._forget()
        self._arenas.clear()
        self._stored.clear()
        self._alike.clear()
        self._shares = self._counts = None


def _attention(arguments: dict[str, Any]) -> tuple[Launch, ...]:
    """The launches on the model's stream: a rotation where codes are centred, parts, their sum."""
    from specache_fx.runtime.kernels.triton_decode import partial_attention
    from specache_fx.runtime.kernels.triton_merge import merge_parts, rotate_queries

    queries = arguments["LANES"] * arguments["batch"] * arguments["num_heads"]
    grid = (arguments["batch"] * arguments["num_kv_heads"], arguments["splits"], arguments["TILES"])
    rotation = taken_by(rotate_queries, arguments) | {"out": arguments["code_query"]}
    return (
        *([Launch(rotate_queries, (queries,), rotation)] if arguments["CENTRED"] else []),
        Launch(partial_attention, grid, taken_by(partial_attention, arguments)),
        Launch(merge_parts, (queries,), taken_by(merge_parts, arguments)),
    )


def _norms(query: torch.Tensor) -> torch.Tensor:
    """What `merge_parts` leaves of queries for their scores."""
    lanes, batch, num_heads = query.shape[:3]
    return query.new_empty((batch, lanes, num_heads), dtype=torch.float32)

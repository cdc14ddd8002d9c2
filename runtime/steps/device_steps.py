"""`DeviceSteps`: all of a layer's decode step as launches that are the same at every length.

`specache::device_step` launches them: `TritonSteps` where Triton's kernels attend, `AtenSteps` where others do. The
device's memory has all that changes from step to step, at addresses that stay: lengths, shares and the padding. So a
step can be captured as a CUDA graph, and replayed until a tensor moves (`generation`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from specache_fx.runtime.layers.layer_state import LayerCall, LayerState
from specache_fx.runtime.layers.layout import LayerTensors
from specache_fx.runtime.steps.fused_steps import FusedSteps, StepFacts
from specache_fx.runtime.steps.stored_tokens import StoredTokens
from specache_fx.runtime.transfer import KernelTransfer


class DeviceSteps(FusedSteps):
    """The launches of one session.

    Args:
        device: Where it is.
        top_k: Slots of a row.
        transfer: Brings the rows; None where nothing is selected.

    Attributes:
        generation: Changes when a tensor moves: captures of the former number are void.
        plain_alone: A step that is not plain is left to the operators (`DecodeStep.by_operators`).
        captures: The step that runs next is captured or replayed, if it is plain.
    """

    plain_alone: ClassVar[bool] = False
    reads_masks: ClassVar[bool] = True

    def __init__(self, device: torch.device, top_k: int, transfer: KernelTransfer | None) -> None:
        self.device, self._top_k, self._transfer = device, top_k, transfer
        self.generation, self.captures = 0, False
        self._arenas: dict[int, weakref.ref[LayerTensors]] = {}  # that the last step ran in
        self._stored: dict[int, StoredTokens] = {}  # by the first of equal layers (`StepFacts.first_layers`)
        self._first_layers: dict[int, int] = {}
        self._tables_moved = 0
        self._shares: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        # Of the step under way.
        self._facts: StepFacts | None = None
        self._caches: Mapping[int, LayerState] = {}
        self._fills = False
        self._run: list[int] = []

    def write_facts(self, layers: Mapping[int, LayerState], facts: StepFacts) -> None:
        """See `FusedSteps`. The current stream waits for all that ran beside the step before."""
        self._fills = facts.num_selectable != facts.num_quantized
        self._facts, self._caches, self._run = facts, layers, []
        moved = [i for i, cache in layers.items() if self._lies_elsewhere(i, cache)]
        for i, cache in layers.items():
            if self._transfer is not None and not cache.is_exact:
                self._transfer.table(i)
        tables_moved = 0 if self._transfer is None else self._transfer.tables.moved
        with torch.inference_mode(False):
            # A table may have moved since the last step: rows of a group that this filled were brought.
            if moved or tables_moved != self._tables_moved or facts.first_layers != self._first_layers:
                self._forget()
            self._tables_moved = tables_moved
            self._first_layers = dict(facts.first_layers)
            self._stored = {
                i: stored for i, stored in self._stored.items() if i in facts.first_layers.values()
            }
            for layer in dict.fromkeys(facts.first_layers.values()):
                self._tell_stored(layer, facts)
            self._shares = self._told(self._shares, facts.shares)
            if facts.counts is not None:
                self._tell_counts(facts.counts)

    def _tell_stored(self, layer: int, facts: StepFacts) -> None:
        """Write the lengths of `layer`, and of others like it."""
        cache, stored = self._caches[layer], self._stored.get(layer)
        if stored is None or stored.room != cache.room:
            self._forget()
            stored = self._stored[layer] = StoredTokens(cache.room, self.device)
        if stored.write_facts(layer, cache, facts):
            self._forget()

    def _lies_elsewhere(self, index: int, cache: LayerState) -> bool:
        known = self._arenas.get(index)
        if known is not None and known() is cache.tensors:
            return False
        self._arenas[index] = weakref.ref(cache.tensors)
        return True

    def _forget(self) -> None:
        """Drop all that was prepared."""
        self.generation += 1

    def _told(self, kept: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor | None:
        """Write `value` where the launches read it; None leaves the former one."""
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
        """Whether the step is plain: it decodes, no group fills, no mask moves."""
        facts = self._facts
        if facts is None or self._fills:
            return False
        return not (facts.predecodes or facts.biases or facts.missed is not None)

    @property
    def form(self) -> tuple[Any, ...]:
        """See `FusedSteps`."""
        facts = self._facts
        assert facts is not None
        told = (part is None for part in (facts.shares, facts.key_mask.real, facts.counts))
        return (self.generation, facts.predecodes, facts.written, facts.scored_lanes, *told, *facts.visible)

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
        facts, cache = self._facts, self._caches.get(layer)
        if facts is None or cache is None or layer in self._run:
            raise RuntimeError(f"layer {layer} is not to run now")
        self._run.append(layer)
        first = self._first_layers[layer]
        stored, sees = self._stored[first], first in facts.visible
        query, key, value = (side.contiguous() for side in (query, key, value))
        call = LayerCall(
            query=query,
            key=key,
            value=value,
            scale=scale,
            independent_lanes=facts.predecodes,
            softcap=softcap,
            sinks=sinks,
            key_mask=None if sees or facts.key_mask.real is None else stored.mask,
            bias=facts.biases.get(layer),
            scored_lanes=facts.scored_lanes,
            visible=stored.visible if sees else None,
        )
        return self._step(layer, cache, call, stored)

    def _step(self, layer: int, cache: LayerState, call: LayerCall, stored: StoredTokens) -> torch.Tensor:
        """See `launch`."""
        raise NotImplementedError

    def end(self) -> tuple[list[int], bool]:
        """See `FusedSteps`."""
        facts, run, late = self._facts, self._run, self._fills
        self._facts, self._caches, self._run = None, {}, []
        if facts is None:
            return run, late
        if facts.biases or facts.missed is not None or facts.counts is not None:
            self.join()  # they are read beside, and the caller may drop them
        if facts.counts is not None and run:
            assert self._counts is not None
            facts.counts.add_(self._counts)
        return run, late

    def join(self) -> None:
        """See `FusedSteps`."""
        if self._transfer is not None:
            self._transfer.join()

    def restart(self) -> None:
        """See `FusedSteps`."""
        self._run = []

    def replayed(self) -> None:
        """See `FusedSteps`."""
        self._run = list(self._caches)

    @property
    def device_bytes(self) -> int:
        """See `FusedSteps`."""
        tensors = [tensor for tensor in (self._shares, self._counts) if tensor is not None]
        for stored in self._stored.values():
            tensors += stored.tensors
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def close(self) -> None:
        """See `FusedSteps`."""
        self._forget()
        self._arenas.clear()
        self._stored.clear()
        self._first_layers.clear()
        self._shares = self._counts = None

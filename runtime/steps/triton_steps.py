"""`TritonSteps`: all of a layer's decode step as Triton launches that are the same at every length.

    stream of the model:  rotate queries -> parts of attention -> their sum, which appends the own pairs
    beside it:            selection scores -> top-k -> plan the slots -> copy their rows -> hit rates

Grids are cut for all that the arenas have room for. What runs beside reads copies of the queries.

Paper: SpeCache Alg. 3. On the CPU `StepTable` does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.kernels import Kernel
from specache_fx.runtime.kernels.triton.arguments import bias_of
from specache_fx.runtime.kernels.triton.kernel import TritonKernel, attention_launches, launch_scores
from specache_fx.runtime.layers.layer_state import LayerCall, LayerState
from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.native.launches import record_launches
from specache_fx.runtime.quant import Quantizer
from specache_fx.runtime.select.topk import MOST_IN_A_KERNEL
from specache_fx.runtime.steps.device_steps import DeviceSteps
from specache_fx.runtime.steps.layer_launches import LayerLaunches, Selection, Shared, prepare
from specache_fx.runtime.steps.stored_tokens import StoredTokens
from specache_fx.runtime.tracing import span
from specache_fx.runtime.transfer import KernelTransfer, Transfer


class TritonSteps(DeviceSteps):
    """The launches of one session. Args as `DeviceSteps`."""

    kernel = "triton"

    def __init__(self, device: torch.device, top_k: int, transfer: KernelTransfer | None) -> None:
        super().__init__(device, top_k, transfer)
        self._layers: dict[tuple[Any, ...], LayerLaunches] = {}
        self._shared: Shared = {}

    @classmethod
    def of(
        cls,
        config: SpecacheConfig,
        kernel: Kernel,
        quantizer: Quantizer,
        transfer: Transfer | None,
        device: torch.device,
    ) -> TritonSteps | None:
        """The steps of a session, or None where these launches can't serve it."""
        if (
            not isinstance(kernel, TritonKernel)
            or quantizer.code_form is None
            or config.aggregation != "mean"
            or config.sink_tokens
            or config.corrects
        ):
            return None
        if transfer is not None and not isinstance(transfer, KernelTransfer):
            return None
        if transfer is not None and config.top_k > MOST_IN_A_KERNEL:
            return None
        return cls(device, config.top_k, transfer)

    def _forget(self) -> None:
        super()._forget()
        self._layers.clear()
        self._shared.clear()

    def _step(self, layer: int, cache: LayerState, call: LayerCall, stored: StoredTokens) -> torch.Tensor:
        facts = self._facts
        assert facts is not None
        key_of_form = (layer, call.query.shape[0], *self.form)
        prepared = self._layers.get(key_of_form)
        if prepared is None:
            with torch.inference_mode(False):
                prepared = self._layers[key_of_form] = prepare(
                    layer, cache, call, stored, facts.written, self._transfer, self._top_k, self._shared
                )
        with triton_ops.on(self.device):
            with span("attention", device=self.device, layer=layer):
                out = self._attend(prepared, call)
            if prepared.selection is not None and self._transfer is not None:
                with self._transfer.beside(layer), span("select", "copies", device=self.device, layer=layer):
                    self._select(layer, prepared.arguments, prepared.selection, stored, call.bias)
        return out

    def _attend(self, prepared: LayerLaunches, call: LayerCall) -> torch.Tensor:
        query, own = call.query, {"own_key": call.key, "own_value": call.value}
        out = query.new_empty((*query.shape[:4], prepared.arguments["VALUE_DIM"]))
        launches = prepared.attention
        if call.bias is not None:
            launches = attention_launches(prepared.arguments | bias_of(call.bias, query))
        *rotations, parts, merge = launches
        for rotation in rotations:
            rotation(query=query)
        parts(query=query, **own)
        merge(out=out, query=query, sinks=triton_ops.pointer_or(call.sinks, query), **own)
        return out

    def _select(
        self,
        layer: int,
        arguments: dict[str, Any],
        prepared: Selection,
        stored: StoredTokens,
        bias: torch.Tensor | None,
    ) -> None:
        """Choose the next step's pairs and bring them; reads nothing that the model may overwrite meanwhile."""
        facts, transfer = self._facts, self._transfer
        assert facts is not None and transfer is not None
        if facts.counts is not None:
            # The copy overwrites which tokens are staged.
            prepared.before.copy_(transfer.staging(layer).indices)
        if self.is_plain and prepared.launches:
            for one in prepared.launches:
                one()
            return
        with record_launches() as launches:
            self._launch_selection(layer, arguments | bias_of(bias, arguments["query"]), prepared, stored)
        if self.is_plain:
            prepared.launches = launches

    def _launch_selection(
        self, layer: int, arguments: dict[str, Any], prepared: Selection, stored: StoredTokens
    ) -> None:
        from specache_fx.runtime.select import triton_topk

        facts, transfer = self._facts, self._transfer
        assert facts is not None and transfer is not None
        kept = {"query": arguments["kept_query"], "own_key": arguments["kept_key"]}
        if not arguments["CENTRED"]:
            kept["code_query"] = kept["query"]
        scores, staging = prepared.scores, transfer.staging(layer)
        launch_scores(arguments | kept | {"out": scores})
        triton_topk.select_topk(
            scores[-1],
            self._top_k,
            other=None if facts.shares is None else scores[0],
            shares=None if facts.shares is None else self._shares,
            told=stored.num_selectable,
            out=prepared.selected,
        )
        if facts.missed is not None:
            torch.where(facts.missed[:, None, None], staging.wanted, staging.indices, out=staging.wanted)
        if not self._fills:
            transfer.copy(layer, stored.num_quantized)
        if facts.counts is not None:
            assert self._counts is not None
            triton_topk.count_overlap(
                scores[0],
                self._top_k,
                prepared.before,
                self._counts,
                told=stored.num_quantized,
                out=prepared.needed,
            )

    @property
    def device_bytes(self) -> int:
        """See `FusedSteps`."""
        tensors = tree_leaves(list(self._shared.values()))
        for launches in self._layers.values():
            tensors += launches.own
        own = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return super().device_bytes + sum(own.values())

"""`AtenSteps`: a layer's plain decode step by any kernel, as if the arena were full.

    attention (rows without a token are masked) -> append -> select -> copy -> hit rates
    lookahead "none":  attention -> select -> copy -> attention -> append

`TritonSteps` has no launches for `policy="kcache"`, lookahead "none", sinks and other quantisers. The kernel reads all
rows that there is room for. A mask hides those without a token, by lengths in the device's memory. So shapes stay, and
the step can be captured. All other steps run operator by operator, on the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.kernels import DecodeInputs, Kernel
from specache_fx.runtime.kernels.triton.kernel import TritonKernel
from specache_fx.runtime.layers.layer_state import LayerCall, LayerState
from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.select import count_overlap, select_topk
from specache_fx.runtime.steps.device_steps import DeviceSteps
from specache_fx.runtime.steps.fused_steps import StepFacts
from specache_fx.runtime.steps.stored_tokens import StoredTokens
from specache_fx.runtime.tracing import span
from specache_fx.runtime.transfer import KernelTransfer, Transfer

_MOST_ROOM = 2  # times the tokens: more of it would be read for nothing


class AtenSteps(DeviceSteps):
    """The steps of one session.

    Args:
        config: Its options.
        kernel: Its kernel.
        transfer: Brings the rows; None where nothing is selected.
        device: Where it is.
    """

    kernel = "aten"
    plain_alone = True

    def __init__(
        self,
        config: SpecacheConfig,
        kernel: Kernel,
        transfer: KernelTransfer | None,
        device: torch.device,
    ) -> None:
        super().__init__(device, config.top_k, transfer)
        self._attention = kernel
        self._selects_first = config.lookahead == "none"
        self._is_full = False
        # Of the step under way, by the first of equal layers (`StepFacts.first_layers`) and an arena's room.
        self._shown: dict[tuple[int, int, int], torch.Tensor] = {}

    @classmethod
    def of(
        cls, config: SpecacheConfig, kernel: Kernel, transfer: Transfer | None, device: torch.device
    ) -> AtenSteps | None:
        """The steps of a session; None where the CPU brings its rows or reads them: no step is captured."""
        if transfer is not None and not isinstance(transfer, KernelTransfer):
            return None
        if config.corrects and (transfer is None or not isinstance(kernel, TritonKernel)):
            return None
        if triton_ops.unavailable_reason(device) is not None:
            return None  # it tells the lengths
        return cls(config, kernel, transfer, device)

    def write_facts(self, layers: Mapping[int, LayerState], facts: StepFacts) -> None:
        """See `FusedSteps`."""
        super().write_facts(layers, facts)
        held = ((cache.room, cache.num_quantized + cache.window_len) for cache in layers.values())
        self._is_full = all(room <= _MOST_ROOM * tokens for room, tokens in held)

    @property
    def is_plain(self) -> bool:
        """See `DeviceSteps`; and much of the room is in use, and the step is captured: else this form gains nothing."""
        return self.captures and self._is_full and super().is_plain

    def restart(self) -> None:
        """See `DeviceSteps`."""
        super().restart()
        self._shown.clear()  # in memory that a capture gave back

    def end(self) -> tuple[list[int], bool]:
        """See `FusedSteps`."""
        self._shown.clear()
        return super().end()

    def _step(self, layer: int, cache: LayerState, call: LayerCall, stored: StoredTokens) -> torch.Tensor:
        facts, transfer = self._facts, None if cache.is_exact else self._transfer
        assert facts is not None
        scored = min(call.scored_lanes or 0, len(call.query)) if transfer is not None else 0
        call = replace(call, scored_lanes=scored)
        if transfer is not None and self._selects_first:
            with span("select", device=self.device, layer=layer):
                _, scores = self._attention.attention(self._inputs(layer, cache, call, stored))
                self._choose(layer, cache, scores)
                transfer.copy(layer, stored.num_quantized)
            call = replace(call, scored_lanes=0)
        if transfer is not None:
            staging = transfer.staging(layer)
            call = replace(call, staged=(staging.rows, staging.indices))
        with span("attention", device=self.device, layer=layer):
            out, scores = self._attention.attention(self._inputs(layer, cache, call, stored))
            at = stored.window_len.to(torch.int64)
            for rows, own in zip(cache.tensors.window, (call.key, call.value), strict=True):
                for lane in range(facts.written):
                    rows.index_copy_(2, at + lane, own[lane])
        if transfer is not None and not self._selects_first:
            with span("select", device=self.device, layer=layer):
                self._choose(layer, cache, scores)
            with transfer.beside(layer), span("copy", "copies", device=self.device, layer=layer):
                transfer.copy(layer, stored.num_quantized)
        return out

    def _choose(self, layer: int, cache: LayerState, scores: torch.Tensor) -> None:
        """Have the slots ask for the top-k by the scores of an attention; see `DecodeStep.select`."""
        facts, transfer = self._facts, self._transfer
        assert facts is not None and transfer is not None
        # Rows without a token have scores below 0, as padding has.
        room = cache.room - cache.tensors.window[0].shape[2]
        scores = scores[..., :room]
        if cache.sinks is not None:
            scores = cache.sinks.hide(scores)
        chooses = scores[-1]
        if facts.shares is not None:
            assert self._shares is not None
            chooses = torch.lerp(scores[0], chooses, self._shares[:, None, None])
        staging = transfer.staging(layer)
        if facts.counts is not None:
            assert self._counts is not None
            count_overlap(scores[0], self._top_k, staging.indices, self._counts)
        staging.wanted.copy_(select_topk(chooses, self._top_k))

    def _inputs(self, layer: int, cache: LayerState, call: LayerCall, stored: StoredTokens) -> DecodeInputs:
        """A full arena, whose rows without a token are hidden."""
        inputs = cache.inputs_at_any_length(call)
        key = self._first_layers[layer], inputs.num_quantized, inputs.window_len
        shown = self._shown.get(key)
        if shown is None:
            shown = self._shown[key] = _shown(inputs, stored)
        return replace(inputs, key_mask=shown) if inputs.visible is None else replace(inputs, visible=shown)


def _shown(inputs: DecodeInputs, stored: StoredTokens) -> torch.Tensor:
    """`DecodeInputs.key_mask` of a full arena, or where there is one, `visible`."""
    codes, window = inputs.num_quantized, inputs.window_len
    lanes, batch = inputs.query.shape[:2]
    row = torch.arange(codes + window, device=inputs.query.device)
    behind = row - codes  # of the window, from its first row on
    there = torch.where(row < codes, row < stored.num_quantized, behind < stored.window_len)
    token = torch.where(row < codes, row, behind + stored.num_quantized)
    if inputs.visible is not None:
        own = stored.num_quantized + stored.window_len + torch.arange(lanes, device=row.device)
        sees = inputs.visible.index_select(2, token) & there
        return torch.cat([sees, inputs.visible.index_select(2, own)], dim=2)
    if inputs.key_mask is None:
        return there.expand(batch, -1)
    return inputs.key_mask.index_select(1, token) & there

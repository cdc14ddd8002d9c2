"""`FusedSteps`: runs all of a layer's decode step as one operator of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specache_fx.runtime.layers.key_mask import KeyMask
from specache_fx.runtime.layers.layer_state import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The facts of a step, told before its graph runs.

    Attributes:
        kv_len: Tokens before the step.
        num_quantized: Of these, in codes, in layers that select.
        num_selectable: Tokens in codes after the step.
        predecodes: See `DecodeStep.predecoding`.
        written: Lanes whose own pairs are written behind the window: 0 in pre-decode, 2 where `DecodeStep.writes_next`.
        scored_lanes: See `DecodeInputs`.
        key_mask: The session's.
        biases: See `DecodeStep`; those of windows over all of `LayerState.window_len`.
        first_layers: By layer, the first one with the same stored tokens and masks: of those that select, of those
            that are resident, of windows with one size and mask.
        visible: By the first of such layers, bool `[lanes, batch, rows + lanes]`: which stored tokens, and which
            of the lanes' own pairs, each lane attends to. Rows: `LayerState.window_len` of a window, else `kv_len`
            (`DecodeStep.seen`).
        shares: See `DecodeStep`.
        missed: See `DecodeStep`.
        counts: See `Metrics.step_counts`; None where nobody counts.
    """

    kv_len: int
    num_quantized: int
    num_selectable: int
    predecodes: bool
    written: int
    scored_lanes: int
    key_mask: KeyMask
    biases: Mapping[int, torch.Tensor]
    first_layers: Mapping[int, int]
    visible: Mapping[int, torch.Tensor]
    shares: torch.Tensor | None
    missed: torch.Tensor | None
    counts: torch.Tensor | None


class FusedSteps:
    """The steps of one session's layers, an operator each: `StepTable` in C++, `DeviceSteps` on a device.

    Nothing runs beside steps of C++, and no memory of theirs counts: that is the default.

    Attributes:
        kernel: Name of the kernel whose layers it runs; see `passes.fuse_layer_steps`.
        device: Where the model's tensors are.
        reads_masks: Steps read the model's masks on the device, where the host would wait to read them.
    """

    kernel: str
    device: torch.device
    reads_masks: ClassVar[bool]

    def write_facts(self, layers: Mapping[int, LayerState], facts: StepFacts) -> None:
        """Prepare the next step, before its graph runs.

        Args:
            layers: The caches that it steps, with room for the pairs that are written. Those that select have one
                length.
            facts: See there.
        """
        raise NotImplementedError

    def end(self) -> tuple[list[int], bool]:
        """Report the layers that ran, also where the graph failed midway.

        Returns:
            The layers that have run, and whether the rows that they chose are still to be brought.
        """
        raise NotImplementedError

    def check(self, error: RuntimeError) -> None:
        """Raise a layer's failure as our own error.

        Raises:
            HostMemoryError: If memory ran out.
        """

    @property
    def form(self) -> tuple[Any, ...]:
        """Key of the prepared step: steps with the same key launch the same, at the same addresses."""
        raise NotImplementedError

    def join(self) -> None:
        """Have the model's stream wait for the work beside it."""

    def restart(self) -> None:
        """Have the layers of the step that was told run, though some seemed to: a capture launches nothing."""

    def replayed(self) -> None:
        """Record that a capture has run: all layers of the step."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that the steps need for themselves."""
        return 0

    def close(self) -> None:
        """Keep no memory; nothing runs any more."""

"""`StoredTokens`: lengths and masks of the layers' tokens in device memory, at addresses that stay."""

from __future__ import annotations

import torch

from specache_fx.runtime.layers.layer_state import LayerState
from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.steps.fused_steps import StepFacts


class StoredTokens:
    """Of layers that have the same ones (`StepFacts.first_layers`): how many, and which of them a lane sees.

    Args:
        room: Tokens that there is room for.
        device: Where the layers are.

    Attributes:
        lengths: int32 `[3]` on the device, see `tell_lengths`: the next three, which are views `[1]` of it.
        num_quantized: Tokens in codes.
        window_len: Rows of the window.
        num_selectable: Tokens that may be chosen.
        mask: Bool `[batch, room]`: which tokens are real; None where nothing was padding.
        visible: Bool `[lanes, batch, room + lanes]`, see `StepFacts`; None where no step had it.
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self.room, self._device = room, device
        self.lengths = torch.zeros(3, dtype=torch.int32, device=device)
        self.num_quantized, self.window_len, self.num_selectable = self.lengths.split(1)
        self.mask: torch.Tensor | None = None
        self.visible: torch.Tensor | None = None
        self._told: torch.Tensor | None = None  # the last value of `mask`

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is on the device."""
        return [tensor for tensor in (self.lengths, self.mask, self.visible) if tensor is not None]

    def write_facts(self, layer: int, cache: LayerState, facts: StepFacts) -> bool:
        """Write the lengths and masks of a step.

        Args:
            layer: The first of the layers.
            cache: Its cache.
            facts: Of the step.

        Returns:
            Whether a tensor is new: nothing that was prepared reads it.
        """
        from specache_fx.runtime.kernels.triton.form import tell_lengths

        num_selectable = 0 if cache.is_exact else facts.num_selectable
        with triton_ops.on(self._device):
            tell_lengths[(1,)](self.lengths, cache.num_quantized, cache.window_len, num_selectable)
        visible, real, new = facts.visible.get(layer), facts.key_mask.real, False
        if visible is not None:
            shape = (*visible.shape[:2], self.room + visible.shape[0])
            if self.visible is None or self.visible.shape != shape:
                self.visible, new = torch.zeros(shape, dtype=torch.bool, device=self._device), True
            self.visible[..., : visible.shape[2]] = visible
        elif real is not None:
            if self.mask is None:
                self.mask = torch.ones((len(real), self.room), dtype=torch.bool, device=self._device)
                new = True
            if real is not self._told:
                self.mask[:, : real.shape[1]] = real
                self.mask[:, real.shape[1] :] = True
                self._told = real
        return new

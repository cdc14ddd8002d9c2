"""Shapes of the models that are measured, with random weights: what a step costs does not depend on the numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes.

    Attributes:
        full_layers: Layers of the whole model, of which `num_layers` are measured.
    """

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    full_layers: int

    def cut(self, num_layers: int | None) -> ModelShape:
        """The same with fewer layers; None leaves all."""
        return self if num_layers is None else replace(self, num_layers=min(num_layers, self.full_layers))

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of one sequence's keys and values, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * tokens * itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 32),
        ModelShape("tiny", 2, 32, 64, 4, 2, 16, 64, 2),
    )
}

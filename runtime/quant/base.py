"""`Quantizer`: the interface of methods that make the low-bit copy C' of the KV cache on the device."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

Planes = tuple[torch.Tensor, ...]
"""The quantised form of keys or values. Each plane is 4-D, `[batch, num_kv_heads, rows, width]`, with the
same number of rows for every `group_size` tokens, or one row for the sequence (`Quantizer.sequence_key_planes`): a
store appends, crops and permutes planes without knowing the method."""

KVKind = Literal["key", "value"]
CODE_ERROR = 0.3
"""The standard deviation of a code's error in steps: 0.29 of evenly spread errors, 0.29 to 0.32 of normal numbers."""

CodeForm = Literal["affine", "centred"]


@dataclass(frozen=True)
class PlaneForm:
    """One plane, for each batch row and kv head.

    Attributes:
        rows: For each group of tokens; 1 of a plane of the sequence.
        width: Numbers in a row.
        dtype: Of these.
        of_sequence: Whether it is one row for all groups.
    """

    rows: int
    width: int
    dtype: torch.dtype
    of_sequence: bool

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self.rows * self.width * self.dtype.itemsize

    def held(self, num_groups: int) -> int:
        """Rows that so many groups have; without a group there is nothing of the sequence either."""
        return min(num_groups, 1) if self.of_sequence else num_groups * self.rows


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 x as `dtype`, clamped to the dtype's largest number; x is overwritten.

    The quantised numbers lay within the range, so that this only brings numbers nearer; an infinity would make
    attention NaN.
    """
    largest = min(torch.finfo(dtype).max, torch.finfo(x.dtype).max)
    return x.clamp_(-largest, largest).to(dtype)


class Quantizer(ABC):
    """Turns 16-bit keys and values into planes and back, by whole groups of `group_size` tokens.

    The planes of a group depend on that group, and on the row's first real tokens where a method has planes of the
    sequence. So quantising groups as they fill gives the planes that quantising them all at prefill would give
    (`docs/laws.md`, law 4). What tokens of a group share (a scale, a mean) is of its real tokens alone (law 7). Inputs
    are finite.

    Planes are contiguous. CONTRIBUTING.md has the steps for a new method.

    Attributes:
        name: The method's name in `QUANTIZERS`.
        valid_bits: The widths that it can be built with, of 1, 2, 4 and 8, narrowest first.
        code_form: For kernels that read codes themselves. "affine": planes are KIVI's (`KiviQuantizer`), and `code *
            scale + zero` is all of dequantisation. "centred": they are `TurboQuantizer`'s. None: kernels can't.
        sequence_key_planes: How many planes of keys, the last ones, are one row for the whole sequence.
        exact_constants: The kinds of which a group of one number comes back exactly.
        beats_zeros: Whether its narrowest codes lose less of normal numbers than zeros would.
        bits: Width of a code.
        group_size: Tokens that are quantised together.
    """

    name: ClassVar[str]
    valid_bits: ClassVar[tuple[int, ...]]
    code_form: ClassVar[CodeForm | None] = None
    sequence_key_planes: ClassVar[int] = 0
    exact_constants: ClassVar[tuple[KVKind, ...]] = ()
    beats_zeros: ClassVar[bool] = True

    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size

    @property
    def asked_by(self) -> str:
        """The options that ask for it, for messages."""
        return f"quantizer={self.name!r}, bits={self.bits}, group_size={self.group_size}"

    @abstractmethod
    def quantize_key(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """Quantise keys.

        Args:
            x: `[batch, num_kv_heads, tokens, head_dim]`, of the KV dtype, any strides, any device; `tokens` a
                multiple of `group_size` (0 too).
            real: bool `[batch, tokens]`: False where a token is padding; None for nowhere. See `_counted`.

        Returns:
            The planes, on x's device.
        """

    def quantize_more_keys(
        self, x: torch.Tensor, held: Planes, real: torch.Tensor | None = None, num_ahead: int = 0
    ) -> Planes:
        """Quantise keys that follow others of their sequence.

        Args:
            x: As for `quantize_key`, and behind these tokens `num_ahead` that are not quantised yet.
            held: The planes of those before; without groups, or empty, where x is the sequence's beginning.
            real: bool `[batch, tokens]`, of those before and of x: False where a token is padding; None for nowhere.
            num_ahead: Tokens at x's end of which planes of the sequence may be made, and no others.

        Returns:
            As `quantize_key`. Planes of the sequence are the held ones, but in rows that had no real token before.
        """
        before, tokens = held[0].shape[2] if held else 0, x.shape[2] - num_ahead
        return self.quantize_key(
            x[:, :, :tokens], None if real is None else real[:, before : before + tokens]
        )

    @abstractmethod
    def quantize_value(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """Quantise values; as `quantize_key`."""

    def score_deviation(self, planes: Planes, query: torch.Tensor) -> torch.Tensor | None:
        """The standard deviation of the error that codes leave in scores.

        Args:
            planes: As for `dequantize_key`.
            query: Scaled queries, float32 `[batch, num_kv_heads, queries, head_dim]`.

        Returns:
            `[batch, num_kv_heads, queries, tokens]`; None where it is unknown.
        """
        return None

    @abstractmethod
    def dequantize_key(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Bring keys back.

        Args:
            planes: The result of `quantize_key`, or whole groups of it.
            head_dim: Channels of a key; packing may have padded them.
            dtype: The KV dtype.

        Returns:
            `[batch, num_kv_heads, tokens, head_dim]` of `dtype`.
        """

    @abstractmethod
    def dequantize_value(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Bring values back; as `dequantize_key`."""

    def plane_forms(self, head_dim: int, dtype: torch.dtype, kind: KVKind) -> tuple[PlaneForm, ...]:
        """Forms of the planes of keys or values, before there are any.

        Args:
            head_dim: Channels of a key or value.
            dtype: The KV dtype.
            kind: "key" or "value".
        """
        return _plane_forms(type(self), self.bits, self.group_size, head_dim, dtype, kind)

    @abstractmethod
    def error_bound(self, planes: Planes, head_dim: int, kind: KVKind) -> torch.Tensor:
        """Bound of the error of quantising and dequantising, without rounding to the KV dtype.

        Args:
            planes: The result of `quantize_key` or `quantize_value`.
            head_dim: Channels of a key or value.
            kind: "key" or "value".

        Returns:
            float32, `[batch, num_kv_heads, tokens, head_dim]` or a tensor that expands to it.
        """

    def bits_per_value(
        self, head_dim: int, dtype: torch.dtype = torch.bfloat16, kind: KVKind | None = None
    ) -> float:
        """Bits that one number takes on the device, with its share of scales, zeros and padding.

        Args:
            head_dim: Channels of a key or value.
            dtype: The KV dtype.
            kind: "key" or "value"; None for both together.
        """
        kinds: tuple[KVKind, ...] = ("key", "value") if kind is None else (kind,)
        forms = (form for kind in kinds for form in self.plane_forms(head_dim, dtype, kind))
        total = sum(form.nbytes for form in forms if not form.of_sequence)
        return 8 * total / (len(kinds) * self.group_size * head_dim)

    def _counted(self, real: torch.Tensor | None) -> torch.Tensor | None:
        """Tokens that count for what their group shares: the real ones, and all where a group is padding.

        A mask that moves may show such a group later.

        Args:
            real: bool `[batch, tokens]`; None where all are real.

        Returns:
            bool `[batch, tokens / group_size, group_size]`, one in each group at least; None where all count.
        """
        if real is None:
            return None
        groups = real.unflatten(1, (real.shape[1] // self.group_size, self.group_size))
        return groups | ~groups.any(2, keepdim=True)

    def _check_whole_groups(self, x: torch.Tensor) -> None:
        if x.shape[2] % self.group_size:
            raise ValueError(
                f"{self.name}: {x.shape[2]} tokens are not a multiple of group_size={self.group_size};"
                " quantise whole groups and keep the rest in the residual window."
            )


@functools.cache
def _plane_forms(
    method: type[Quantizer], bits: int, group_size: int, head_dim: int, dtype: torch.dtype, kind: KVKind
) -> tuple[PlaneForm, ...]:
    """Those of a group that is quantised without numbers."""
    quantizer = method(bits, group_size)
    group = torch.empty(1, 1, group_size, head_dim, dtype=dtype, device="meta")
    planes = quantizer.quantize_key(group) if kind == "key" else quantizer.quantize_value(group)
    of_groups = len(planes) - (method.sequence_key_planes if kind == "key" else 0)
    return tuple(
        PlaneForm(plane.shape[2], plane.shape[3], plane.dtype, i >= of_groups)
        for i, plane in enumerate(planes)
    )

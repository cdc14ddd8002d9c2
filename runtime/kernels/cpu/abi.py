"""`SpecacheInputs` of `inputs.h`, field by field, and how tensors become addresses."""

from __future__ import annotations

import ctypes

import torch

_i64, _f32, _address = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class PlaneC(ctypes.Structure):
    """`SpecachePlane`: a tensor `[batch, kv_heads, rows, width]` whose rows lie one behind the other."""

    _fields_ = (("data", _address), ("batch_stride", _i64), ("head_stride", _i64))


CODE_PLANES = ("key_codes", "key_scale", "key_zero", "value_codes", "value_scale", "value_zero")


class InputsC(ctypes.Structure):
    """`SpecacheInputs`; `inputs.h` documents each field."""

    _fields_ = (
        *((name, _i64) for name in ("dtype", "bits", "group_size", "value_group", "centred")),
        *((name, _i64) for name in ("lanes", "batch", "kv_heads", "heads_per_kv", "key_dim", "value_dim")),
        *((name, _i64) for name in ("num_quantized", "window_len", "num_staged", "staged_heads")),
        *((name, _i64) for name in ("independent_lanes", "threads")),
        *((name, _i64) for name in ("scored_lanes", "max_of_heads", "chooses")),
        *((name, _i64) for name in ("bias_lane_stride", "bias_batch_stride", "bias_head_stride")),
        *((name, _f32) for name in ("scale", "softcap", "tolerance", "key_share", "value_share")),
        *((name, _address) for name in ("query", "own_key", "own_value")),
        *(
            (name, PlaneC)
            for name in (*CODE_PLANES, "key_balance", "window_key", "window_value", "staged_rows")
        ),
        *((name, _address) for name in ("staged_indices", "key_mask", "visible", "bias", "sinks")),
        *((name, _address) for name in ("out", "scores", "shares", "host")),
        ("host_length", _i64),
        ("num_read", _address),
    )


class Addresses:
    """Addresses of tensors, which it keeps alive: tensors in another layout than the kernel's are copied.

    Args:
        in_place: Make no copies: the addresses are to outlive this object, and be those of the tensors themselves.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        self._in_place = in_place
        self._kept: list[torch.Tensor] = []

    def of(self, x: torch.Tensor | None, dtype: torch.dtype | None = None) -> int | None:
        """Of a contiguous tensor of that dtype (its own by default); None for None."""
        if x is None:
            return None
        if (dtype is not None and x.dtype != dtype) or not x.is_contiguous():
            x = self._copied(x.to(dtype).contiguous())
        self._kept.append(x)
        return x.data_ptr()

    def plane(self, x: torch.Tensor | None) -> PlaneC:
        """Of a 4-D tensor whose rows lie one behind the other."""
        if x is None:
            return PlaneC()
        if x.stride(3) != 1 or x.stride(2) != x.shape[3]:
            x = self._copied(x.contiguous())
        self._kept.append(x)
        return PlaneC(x.data_ptr(), x.stride(0), x.stride(1))

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        assert not self._in_place, "a tensor of a layer's memory is no rows one behind the other"
        return x

"""The devices on which Triton's kernels can run. Triton itself is imported when it is asked for, and not before.

Paper: none; this is about machines.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import torch

# bfloat16 products in tensor cores, and copies that run beside compute, begin with Ampere.
_LEAST_CAPABILITY = (8, 0)


@functools.cache
def installed() -> bool:
    """Whether there is a Triton to import."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def interpreted() -> bool:
    """Whether Triton was imported under `TRITON_INTERPRET=1`: its kernels then run in NumPy, on any device."""
    import triton

    # Triton decides when a function is decorated, and its own library was decorated first.
    return not isinstance(triton.language.sum, triton.JITFunction)


def unavailable_reason(device: torch.device) -> str | None:
    """Say why Triton's kernels can't run on `device`, or None if they can."""
    if not installed():
        return "Triton is not installed (pip install triton; torch's CUDA builds for Linux bring it)"
    if device.type == "cpu":
        if interpreted():
            return None
        return "Triton's kernels are compiled for NVIDIA GPUs (TRITON_INTERPRET=1 runs them on the CPU, for tests)"
    if device.type != "cuda" or torch.version.hip is not None:
        return "these kernels have been written for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, own = (".".join(map(str, version)) for version in (_LEAST_CAPABILITY, capability))
        return f"they need compute capability {least}, and this GPU has {own}"
    return None


@functools.cache
def runs_by_itself(device: torch.device) -> bool:
    """Whether Triton is the way to go on `device` where nobody named it: on a GPU, and compiled."""
    return device.type == "cuda" and unavailable_reason(device) is None and not interpreted()


def pointer_or(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """`x`, or where there is none any tensor of the same device: a kernel that was told so never reads it."""
    return other if x is None else x


def dtype(of: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    import triton.language

    return getattr(triton.language, str(of).removeprefix("torch."))


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch on `device`: Triton launches on the current one, whatever its arguments' is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

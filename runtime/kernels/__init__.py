"""Attention kernels: a table, and the choice of one by name or by device."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from specache_fx._log import warn_once
from specache_fx.errors import ConfigError, KernelUnavailableError
from specache_fx.runtime.kernels.base import (
    DecodeInputs,
    Expand,
    Kernel,
    LaneInputs,
    LayerForm,
    Originals,
    refuse,
)
from specache_fx.runtime.kernels.cpu import CpuKernel
from specache_fx.runtime.kernels.exact_pairs import ExactPairsKernel
from specache_fx.runtime.kernels.reference import ReferenceKernel
from specache_fx.runtime.kernels.triton.kernel import TritonKernel

__all__ = [
    "KERNELS",
    "DecodeInputs",
    "Expand",
    "Kernel",
    "LaneInputs",
    "LayerForm",
    "Originals",
    "check_forms",
    "check_kernel",
    "choose_kernel",
]

_log = logging.getLogger(__name__)

# In the order in which "auto" tries them: the fastest first, the reference last.
_IN_ORDER: tuple[Kernel, ...] = (CpuKernel(), TritonKernel(), ReferenceKernel())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _IN_ORDER}

# "auto" leaves these alone: on the CPU Triton's kernels run in an interpreter, for tests.
_BY_NAME_ONLY = {("triton", "cpu")}


def check_kernel(name: str) -> None:
    """Refuse a name that no kernel has.

    Raises:
        ConfigError: Lists the names.
    """
    if name != "auto" and name not in KERNELS:
        raise ConfigError(
            f"kernel={name!r} is not known: choose one of 'auto', {', '.join(map(repr, KERNELS))}."
        )


def choose_kernel(name: str, device: torch.device) -> Kernel:
    """The kernel of that name, or the first that runs on `device` for "auto".

    That one hands layers that it can't compute to slower ones, and says so. A kernel asked for by name raises.

    Raises:
        ConfigError: If there is no kernel of that name.
        KernelUnavailableError: If it can't run on `device`. A kernel asked for by name is never replaced.
    """
    if name == "auto":
        kernel = next(
            kernel
            for kernel in KERNELS.values()
            if (kernel.name, device.type) not in _BY_NAME_ONLY and kernel.unavailable_reason(device) is None
        )
        if device.type == "cpu" and kernel.name != "cpu":
            warn_once(
                _log,
                f"Attention will be slow: the CPU kernel can't run ({KERNELS['cpu'].unavailable_reason(device)}), so"
                f" kernel={kernel.name!r} takes its place.",
            )
        return kernel.or_else(ExactPairsKernel())
    check_kernel(name)
    reason = KERNELS[name].unavailable_reason(device)
    if reason is not None:
        raise KernelUnavailableError(f"kernel={name!r} can't run on {device}: {reason}. Use kernel='auto'.")
    return KERNELS[name]


def check_forms(name: str, forms: Iterable[LayerForm]) -> None:
    """Refuse, before a graph has run, a kernel that was asked for by name and can't compute a layer of it.

    Raises:
        KernelUnavailableError: With the reason and the remedy.
    """
    for form in forms if name != "auto" else ():
        if (reason := KERNELS[name].misfit(form)) is not None:
            raise refuse(name, reason)

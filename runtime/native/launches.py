"""Launches of Triton kernels that are made again with the same arguments.

Triton binds arguments by name and inspects each: 20 to 40 us a launch of fifty. A `Launch` keeps the compiled kernel
and calls it with the arguments in order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_ALIGN_BYTES = 16  # the alignment that Triton's compiler distinguishes

_here = threading.local()


class Launch:
    """One kernel with its grid and its arguments.

    Args:
        kernel: A function of `triton.jit`, autotuned or not.
        grid: Programs.
        arguments: By name; names that the kernel does not know are left out, but for Triton's own options.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        self._kernel, self._grid, self._arguments = kernel, grid, dict(arguments)
        self._compiled: dict[tuple[bool, ...], Any] = {}  # by the alignment of arguments that move
        self._places = {name: place for place, name in enumerate(kernel.arg_names)}
        self._values = [self._arguments.get(name) for name in kernel.arg_names]

    def __call__(self, **moving: torch.Tensor) -> None:
        """Launch it on the current stream.

        Args:
            moving: Tensors in place of those in `arguments`, of the same dtypes: the same names in each call.
        """
        aligned = tuple(not tensor.data_ptr() % _ALIGN_BYTES for tensor in moving.values())
        run = self._compiled.get(aligned)
        if run is None:
            compiled = self._kernel[self._grid](**(self._arguments | moving))
            if compiled is not None:  # Triton's interpreter compiles nothing
                self._compiled[aligned] = compiled[(*self._grid, 1, 1)[:3]]
            return
        values = list(self._values)  # activations are not kept
        for name, tensor in moving.items():
            values[self._places[name]] = tensor
        run(*values)


def launch(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> None:
    """Launch a kernel on the current stream; see `Launch`."""
    one = Launch(kernel, grid, arguments)
    one()
    if (notes := getattr(_here, "notes", None)) is not None:
        notes.append(one)


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect this thread's launches by `launch` within the block, in order."""
    before, _here.notes = getattr(_here, "notes", None), []
    try:
        yield _here.notes
    finally:
        _here.notes = before

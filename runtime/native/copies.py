"""Copies of rows on the CPU as one C++ call each; NumPy does the same where it can't be built."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.cpp_build import SOURCES, BuildError, load_library, usable_instruction_sets

_log = logging.getLogger(__name__)

_i64, _address = ctypes.c_int64, ctypes.c_void_p
_NO_MEMORY, _NO_TOKEN = 1, 2


class StageC(ctypes.Structure):
    """`SpecacheStage` of copies.cpp."""

    _fields_ = (
        *((name, _i64) for name in ("rows", "top_k", "row_bytes", "length", "num_blocks")),
        *((name, _address) for name in ("blocks", "starts", "wanted", "slots", "staged")),
        *((name, _i64) for name in ("fetched", "kept")),
        ("seconds", ctypes.c_double),
    )


@functools.cache
def address() -> int | None:
    """Of `specache_stage`, for C++ to call."""
    library = load()
    return None if library is None else ctypes.cast(library.specache_stage, _address).value


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, built at first use; None where it can't be."""
    try:
        loaded = load_library("copies", SOURCES, usable_instruction_sets()[0])
    except BuildError as error:
        _log.info("copies without C++: %s", error)
        return None
    loaded.specache_stage_size.restype = loaded.specache_stage.restype = _i64
    loaded.specache_stage.argtypes = (ctypes.POINTER(StageC),)
    assert loaded.specache_stage_size() == ctypes.sizeof(StageC)
    return loaded


class StageArguments:
    """What C++ is told of a layer, kept from copy to copy.

    Args:
        wanted: int32 `[batch, num_kv_heads, top_k]`, unique in a row; -1 is none.
        slots: The same shape: the token in each slot, -1 where it is empty. Changed.
        rows: `[batch, num_kv_heads, top_k, row_dim]`, contiguous. Changed.
        c: Is filled in; a new one by default.
    """

    def __init__(
        self, wanted: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, c: StageC | None = None
    ) -> None:
        batch, heads, top_k = wanted.shape
        self.c = StageC() if c is None else c
        self.c.rows, self.c.top_k = batch * heads, top_k
        self.c.row_bytes = rows.shape[3] * rows.element_size()
        self.c.wanted, self.c.slots, self.c.staged = wanted.data_ptr(), slots.data_ptr(), rows.data_ptr()
        self._kept = wanted, slots, rows
        self._lists: tuple[object, ...] = ()

    def of_host(self, blocks: Sequence[torch.Tensor], starts: Sequence[int], length: int) -> None:
        """Read from these blocks from now on.

        Args:
            blocks: `[batch, num_kv_heads, tokens of the block, row_dim]` each, contiguous, on the CPU.
            starts: The first token of each block and, last, one past the end of the last.
            length: Tokens that the host holds.
        """
        self.c.length = length
        if self._lists and len(starts) == self.c.num_blocks + 1:
            return  # blocks come, and none ever changes
        # Another thread may be adding a block: it is listed first, and its end afterwards.
        ends = tuple(starts)
        held = tuple(blocks[: len(ends) - 1])
        block_list = (_address * len(held))(*(block.data_ptr() for block in held))
        start_list = (_i64 * len(ends))(*ends)
        self.c.num_blocks = len(held)
        self.c.blocks, self.c.starts = ctypes.addressof(block_list), ctypes.addressof(start_list)
        self._lists = held, block_list, start_list

    def check(self, failed: int, layer: int) -> None:
        """Raise what a copy failed with, if it did.

        Args:
            failed: What C++ returned.
            layer: Layer number, for messages.

        Raises:
            IndexError: If a token is not on the host; nothing has changed then.
            HostMemoryError: If there is no memory to plan in.
        """
        if failed == _NO_TOKEN:
            raise IndexError(f"Token {self.c.fetched} of layer {layer}, which holds {self.c.length}.")
        if failed == _NO_MEMORY:
            raise HostMemoryError("There is no memory to stage pairs: free some, or lower top_k.")

    def call(self, library: ctypes.CDLL) -> int:
        """Bring the wanted rows to the slots: those that are there stay, the others take slots that are free.

        Returns:
            What `check` raises an error of; 0 for none.
        """
        return int(library.specache_stage(ctypes.byref(self.c)))

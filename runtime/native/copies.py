"""Copies of rows on the CPU as one C++ call each; NumPy does the same where it can't be built."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.cpp_build import BuildError, load_library, usable_instruction_sets

_log = logging.getLogger(__name__)

_i64, _address = ctypes.c_int64, ctypes.c_void_p
_NO_MEMORY, _NO_TOKEN = 1, 2


class StageC(ctypes.Structure):
    """`SpecacheStage` of stage.h."""

    _fields_ = (
        *((name, _i64) for name in ("rows", "top_k", "row_bytes", "length", "num_blocks")),
        *((name, _address) for name in ("blocks", "starts", "wanted", "slots", "staged")),
        *((name, _i64) for name in ("fetched", "kept")),
    )


class QueueC(ctypes.Structure):
    """`SpecacheCopyQueue` of copies.cpp."""

    _fields_ = (
        *((name, _address) for name in ("oldest", "newest")),
        *(("ended", _i64), ("came", _address), ("process", _i64)),
    )


class CopyC(ctypes.Structure):
    """`SpecacheCopy` of copies.cpp."""

    _fields_ = (
        ("stage", StageC),
        *((name, _i64) for name in ("failed", "state", "thread")),
        *((name, ctypes.c_double) for name in ("start", "stop")),
        ("queue", _address),
        ("next", _address),
    )


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, built at first use; None where it can't be."""
    try:
        loaded = load_library("copies", Path(__file__).parent, usable_instruction_sets()[0])
    except BuildError as error:
        _log.info("copies without C++: %s", error)
        return None
    loaded.specache_copy_size.restype = loaded.specache_stage.restype = (
        loaded.specache_copy_finish.restype
    ) = _i64
    loaded.specache_stage.argtypes = (ctypes.POINTER(StageC),)
    loaded.specache_copy_finish.argtypes = (_address, ctypes.c_double)
    for name in ("copy_start", "copies_serve", "copies_end"):
        getattr(loaded, f"specache_{name}").argtypes = (_address,)
        getattr(loaded, f"specache_{name}").restype = None
    loaded.specache_copies_make.restype = None
    assert loaded.specache_copy_size() == ctypes.sizeof(CopyC)
    return loaded


class StageArguments:
    """What C++ is told of a layer, kept from copy to copy.

    Args:
        wanted: int32 `[batch, num_kv_heads, top_k]`, unique in a row; -1 is none.
        slots: The same shape: the token in each slot, -1 where it is empty. Changed.
        rows: `[batch, num_kv_heads, top_k, row_dim]`, contiguous. Changed.
        into: Where to put them; a structure of its own by default.
    """

    def __init__(
        self, wanted: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, into: StageC | None = None
    ) -> None:
        batch, heads, top_k = wanted.shape
        self.c = StageC() if into is None else into
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


def stage_rows(library: ctypes.CDLL, layer: int, arguments: StageArguments) -> tuple[int, int]:
    """Bring the wanted rows to the slots: those that are there stay, the others take slots that are free.

    Args:
        library: What `load()` gave.
        layer: Layer number, for messages.
        arguments: The layer's, with its blocks.

    Returns:
        Rows that were fetched, and rows that stayed.

    Raises:
        Exception: See `StageArguments.check`.
    """
    arguments.check(library.specache_stage(ctypes.byref(arguments.c)), layer)
    return arguments.c.fetched, arguments.c.kept

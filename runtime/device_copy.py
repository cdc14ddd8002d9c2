"""`DeviceCopy`: copies that the device plans and makes by itself, out of page-locked host memory.

    prefetch:  event behind the selection -> side stream: plan the slots, copy the rows -> event

No index visits the CPU, no thread runs, nothing waits: two launches a layer. What was fetched is counted on the device.
"""

from __future__ import annotations

import torch

from specache_fx.errors import SpecacheError
from specache_fx.runtime import triton_ops
from specache_fx.runtime.host_cache import HostCache
from specache_fx.runtime.launches import launch
from specache_fx.runtime.staging import Staging

_TOKENS_AT_ONCE = 64
_TILE_WORDS = 1024
_LEAST_BLOCKS = 31
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def runs(host: HostCache, device: torch.device) -> bool:
    """Whether the device can read the host's rows, and there is a kernel to do so."""
    return host.is_pinned and triton_ops.runs_by_itself(device)


class DeviceCopy:
    """The kernels' side of one session's copies.

    Args:
        host: Where the rows come from; its blocks stay while copies are under way.
        device: Where they go.
    """

    def __init__(self, host: HostCache, device: torch.device) -> None:
        self._host, self._device = host, device
        # Rows that came, rows that stayed, tokens that the host did not hold; by layer, for their rows differ in size.
        self._counters: dict[int, torch.Tensor] = {}
        # Of each layer how many blocks of the host its table tells, and the table; see `copy_rows`.
        self._tables: dict[int, tuple[int, torch.Tensor]] = {}
        # By shape: layers are copied one after the other, so that they share it.
        self._scratch: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def copy(self, layer: int, staging: Staging, told: torch.Tensor | None = None) -> None:
        """Bring what `staging.wanted` names to the slots, on the current stream.

        Args:
            layer: Layer number.
            staging: Its slots.
            told: Tokens that the host holds, int32 `[1]` on the device; None: as many as it holds now.
        """
        from specache_fx.runtime.kernels.triton_gather import copy_rows, plan_slots

        table = self.table(layer)
        counters, (missing, source) = self._of(layer, staging)
        batch, heads, top_k = staging.wanted.shape
        rows = staging.rows.view(_word_of(staging.rows))
        words = rows.shape[3]
        padded = triton_ops.power_of_two(words)
        slots = max(min(_TILE_WORDS // padded, triton_ops.power_of_two(top_k)), 1)
        with triton_ops.on(self._device):
            launch(
                plan_slots,
                (batch * heads,),
                staged=staging.indices,
                wanted=staging.wanted,
                missing=missing,
                source=source,
                counters=counters,
                lengths=counters if told is None else told,
                length=self._host.length(layer) if told is None else 0,
                top_k=top_k,
                TOLD=told is not None,
                BLOCK=min(_TOKENS_AT_ONCE, triton_ops.power_of_two(top_k)),
            )
            launch(
                copy_rows,
                (batch * heads, -(-top_k // slots)),
                rows=rows,
                staged=staging.indices,
                missing=missing,
                source=source,
                table=table,
                most_blocks=len(table) // 2 - 1,
                top_k=top_k,
                WORDS=words,
                WORDS_PAD=padded,
                SLOTS=slots,
            )

    def count(self, layer: int) -> tuple[int, int]:
        """Rows that came and that stayed, so far. Waits for the device: for `stats()`.

        Raises:
            SpecacheError: If a token was asked for that the host does not hold.
        """
        if layer not in self._counters:
            return 0, 0
        came, stayed, wrong = self._counters[layer].tolist()
        if wrong:
            raise SpecacheError(
                f"{wrong} tokens were to be prefetched for layer {layer} that its host tier does not hold: their slots"
                " stayed empty. This is a bug of specache_fx: please report it."
            )
        return came, stayed

    def layers(self) -> list[int]:
        """Layers that something was copied for."""
        return list(self._counters)

    @property
    def nbytes(self) -> int:
        """Bytes on the device that are no slots."""
        tables = sum(table.nbytes for _, table in self._tables.values())
        counters = sum(counter.nbytes for counter in self._counters.values())
        return tables + counters + sum(part.nbytes for pair in self._scratch.values() for part in pair)

    def _of(self, layer: int, staging: Staging) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        shape = tuple(staging.wanted.shape)
        with torch.inference_mode(False):
            if layer not in self._counters:
                self._counters[layer] = torch.zeros(3, dtype=torch.int64, device=self._device)
            if shape not in self._scratch:
                self._scratch[shape] = torch.empty_like(staging.wanted), torch.empty_like(staging.wanted)
        return self._counters[layer], self._scratch[shape]

    def table_of(self, layer: int) -> torch.Tensor | None:
        """The table as it was told last."""
        return self._tables.get(layer, (0, None))[1]

    def table(self, layer: int) -> torch.Tensor:
        """Where the host's blocks are, see `copy_rows`: up to date, and the same tensor until they are too many."""
        blocks, starts = self._host.blocks(layer)
        told, table = self._tables.get(layer, (0, None))
        if told == len(blocks) and table is not None:
            return table
        if table is None or len(blocks) > len(table) // 2 - 1:
            most = max(_LEAST_BLOCKS, 2 * len(blocks))
            with torch.inference_mode(False):
                table = torch.zeros(2 + 2 * most, dtype=torch.int64, device=self._device)
        most = len(table) // 2 - 1
        spare = [0] * (most - len(blocks))
        rows = [len(blocks), *(block.data_ptr() for block in blocks), *spare, *starts, *spare]
        with torch.inference_mode(False):
            new = torch.tensor(rows, dtype=torch.int64, device="cpu")
            # From pageable memory the driver takes its own copy, at once.
            table.copy_(new, non_blocking=True)
        self._tables[layer] = len(blocks), table
        return table


def _word_of(rows: torch.Tensor) -> torch.dtype:
    """The widest integer that a row is a whole number of."""
    nbytes = rows.shape[3] * rows.element_size()
    return next(dtype for size, dtype in _WORDS.items() if nbytes % size == 0)

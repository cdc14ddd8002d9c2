"""`CpuTransfer`: copies within the call that asks for them, some 40 us a layer."""

from __future__ import annotations

import time

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.host.host_cache import HostCache, row_bytes
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.tracing import span
from specache_fx.runtime.transfer.base import Transfer
from specache_fx.runtime.transfer.staging import Staging, plan_slots


def bring(host: HostCache, layer: int, staging: Staging) -> tuple[int, int]:
    """Bring the rows of `staging.wanted` to the slots, all on the CPU; where it raises, the slots are as they were.

    In C++ where it can be built. `plan_slots` defines the answer.

    Args:
        host: Where the rows come from.
        layer: Layer number.
        staging: Its slots.

    Returns:
        How many rows came, and how many were there.

    Raises:
        IndexError: If a token is not on the host.
        HostMemoryError: If there is no memory to plan in.
    """
    with span("prefetch", "copies", layer=layer):
        if graph_ops.load() is not None:
            length = host.length(layer)  # before the table: another thread may be appending
            failed, came, stayed = torch.ops.specache.stage.default(
                host.table(layer), length, staging.wanted, staging.slots, staging.rows
            )
            if failed == graph_ops.Failure.NOT_ON_HOST:
                raise IndexError(f"Token {came} of layer {layer}, which holds {length}.")
            if failed == graph_ops.Failure.NO_MEMORY:
                raise HostMemoryError("There is no memory to stage pairs: free some, or lower top_k.")
            return came, stayed
        plan = plan_slots(staging.slots, staging.wanted)
        rows = host.gather_rows(layer, plan.batch_idx, plan.head_idx, plan.token_idx)
        row_bytes(staging.rows)[plan.slot_idx.numpy()] = row_bytes(rows)
        staging.slots.copy_(plan.slots)
        return len(plan.slot_idx), plan.num_kept


class CpuTransfer(Transfer):
    """Copies at once: a prefetch that has returned is through. Args as `Transfer`."""

    def prefetch_wanted(self, layer: int) -> None:
        """See `Transfer`."""
        start, staging = time.perf_counter(), self.staging(layer)
        came, stayed = bring(self.host, layer, staging)
        size = staging.row_bytes
        self.count_copies(came, came * size, stayed, stayed * size, time.perf_counter() - start)

    def count_copies(
        self, fetched_rows: int, fetched_bytes: int, reused_rows: int, reused_bytes: int, seconds: float
    ) -> None:
        """Count copies; `StepTable` does so where C++ has made them by itself."""
        metrics = self._metrics
        metrics.fetched_rows += fetched_rows
        metrics.fetched_bytes += fetched_bytes
        metrics.reused_rows += reused_rows
        metrics.reused_bytes += reused_bytes
        # Nothing is computed meanwhile.
        metrics.copy_seconds += seconds
        metrics.waited_seconds += seconds

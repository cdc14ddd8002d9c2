"""`CopyJob`: one copy of rows from the host to a layer's slots, as the copy engine's thread runs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specache_fx.runtime.host_cache import HostCache, row_bytes
from specache_fx.runtime.native import copies
from specache_fx.runtime.staging import Outcome, SlotPlan, Staging, plan_slots
from specache_fx.runtime.tracing import span


@dataclass
class CopyMetrics:
    """What an engine has copied; up to date for a layer after its `wait`.

    Attributes:
        fetched_rows: Rows (a key with its value) brought from the host.
        reused_rows: Rows asked for that were staged already.
        fetched_bytes: Bytes of the fetched rows.
        reused_bytes: Bytes of the reused rows, which were not moved.
        copy_seconds: What the copies took on the thread that made them.
        waited_seconds: What was waited for them.
    """

    fetched_rows: int = 0
    reused_rows: int = 0
    fetched_bytes: int = 0
    reused_bytes: int = 0
    copy_seconds: float = 0.0
    waited_seconds: float = 0.0

    def count(self, came: int, stayed: int, row_bytes: int) -> None:
        """Count a copy's rows of so many bytes each."""
        self.fetched_rows += came
        self.fetched_bytes += came * row_bytes
        self.reused_rows += stayed
        self.reused_bytes += stayed * row_bytes


@dataclass(slots=True, kw_only=True)
class CopyJob:
    """Brings what `staging.wanted` names to the slots; a failure empties them and goes to `outcome`.

    Attributes:
        host: Where the rows come from.
        layer: Layer number.
        staging: The layer's slots.
        metrics: Counts the rows.
        outcome: Told when the copy is through (CUDA: issued).
        delay: Called first; for tests.
        stream: CUDA: where the copy is issued.
        selected: CUDA: recorded behind the selection.
    """

    host: HostCache
    layer: int
    staging: Staging
    metrics: CopyMetrics
    outcome: Outcome
    delay: Callable[[], None] | None
    stream: torch.cuda.Stream | None
    selected: torch.cuda.Event | None

    def __call__(self) -> None:
        """Copy."""
        try:
            start = time.perf_counter()
            with span("prefetch", "copies", stream=self.stream, layer=self.layer):
                if self.delay is not None:
                    self.delay()
                if self.stream is None:
                    self._copy()
                else:
                    self._copy_to_cuda(self.stream)
            self.metrics.copy_seconds += time.perf_counter() - start
        except BaseException as error:
            # Told first: whoever waits must not hang, even if a broken device can't empty the slots.
            self.staging.failed = True
            self.outcome.set(error)
        else:
            self.outcome.set()

    def _copy(self) -> None:
        staging = self.staging
        if (library := copies.load()) is not None:
            arguments = copies.StageArguments(staging.wanted, staging.slots, staging.rows)
            arguments.of_host(*self.host.blocks(self.layer), self.host.length(self.layer))
            arguments.check(arguments.call(library), self.layer)
            self._count(arguments.c.fetched, arguments.c.kept)
            return
        plan = plan_slots(staging.slots, staging.wanted)
        row_bytes(staging.rows)[plan.slot_idx.numpy()] = row_bytes(self._gather(plan))
        staging.slots.copy_(plan.slots)

    def _copy_to_cuda(self, stream: torch.cuda.Stream) -> None:
        assert self.selected is not None
        staging = self.staging
        device = staging.rows.device
        with torch.cuda.device(device), torch.cuda.stream(stream):
            # Behind the selection, and so behind the attention that read these slots.
            stream.wait_event(self.selected)
            plan = plan_slots(staging.slots, staging.wanted.cpu())
            # Fresh page-locked buffers: the allocator hands one out again only when its copy is through.
            rows = self._gather(plan).pin_memory().to(device, non_blocking=True)
            slot_idx = plan.slot_idx.pin_memory().to(device, non_blocking=True)
            staging.flat_rows.index_copy_(0, slot_idx, rows)
            staging.indices.copy_(plan.slots.pin_memory(), non_blocking=True)
            staging.slots.copy_(plan.slots)
            staging.done = torch.cuda.Event()
            staging.done.record(stream)

    def _gather(self, plan: SlotPlan) -> torch.Tensor:
        rows = self.host.gather_rows(self.layer, plan.batch_idx, plan.head_idx, plan.token_idx)
        self._count(len(rows), plan.num_kept)
        return rows

    def _count(self, came: int, stayed: int) -> None:
        rows = self.staging.rows
        self.metrics.count(came, stayed, rows.shape[3] * rows.element_size())

"""`CudaWorkerTransfer`: for hosts that a GPU can't read by itself, and where Triton can't copy.

event behind the selection -> the thread: wait for it, plan the slots, gather into page-locked buffers
-> side stream: send the buffers -> event, which `wait` waits for
"""

from __future__ import annotations

from functools import partial

import torch

from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.native import cuda_streams
from specache_fx.runtime.tracing import span
from specache_fx.runtime.transfer.staging import Staging, plan_slots
from specache_fx.runtime.transfer.worker import Copy, WorkerTransfer


class CudaWorkerTransfer(WorkerTransfer):
    """A thread gathers rows and sends them to a GPU. Args as `Transfer`."""

    def __init__(self, host: HostCache, top_k: int, device: torch.device) -> None:
        super().__init__(host, top_k, device)
        self._stream = cuda_streams.lend(self, device)

    def _copy(self, layer: int, staging: Staging) -> Copy:
        selected = torch.cuda.Event()
        selected.record(torch.cuda.current_stream(self._device))
        return partial(_send, self.host, layer, staging, self._stream, selected)

    def _wait(self, layer: int) -> None:
        super()._wait(layer)
        self.staging(layer).order()

    def _shutdown(self) -> None:
        super()._shutdown()
        cuda_streams.synchronize(self._device)


def _send(
    host: HostCache, layer: int, staging: Staging, stream: torch.cuda.Stream, selected: torch.cuda.Event
) -> tuple[int, int]:
    """As `cpu.bring`, to a GPU; the rows are there behind `staging.done`."""
    device = staging.rows.device
    with (
        span("prefetch", "copies", stream=stream, layer=layer),
        torch.cuda.device(device),
        torch.cuda.stream(stream),
    ):
        # The session may be dropped meanwhile: its slots go to others when this stream is through.
        for slots in (staging.rows, staging.indices, staging.wanted):
            slots.record_stream(stream)
        # Behind the selection, and so behind the attention that read these slots.
        stream.wait_event(selected)
        plan = plan_slots(staging.slots, staging.wanted.cpu())
        rows = host.gather_rows(layer, plan.batch_idx, plan.head_idx, plan.token_idx)
        # Fresh page-locked buffers: the allocator hands one out again only when its copy is through.
        rows = rows.pin_memory().to(device, non_blocking=True)
        slot_idx = plan.slot_idx.pin_memory().to(device, non_blocking=True)
        staging.rows.view(-1, rows.shape[-1]).index_copy_(0, slot_idx, rows)
        staging.indices.copy_(plan.slots.pin_memory(), non_blocking=True)
        staging.slots.copy_(plan.slots)
        staging.done = torch.cuda.Event()
        staging.done.record(stream)
    return len(plan.slot_idx), plan.num_kept

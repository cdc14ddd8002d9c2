"""`CudaTransfer`: the device plans and copies by itself, out of page-locked host memory.

    prefetch:  event behind the selection -> side stream: plan the slots, copy the rows -> event

No index visits the CPU, no thread runs, nothing waits: two launches a layer. The device counts what it fetches.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from specache_fx.errors import SpecacheError
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.native import cuda_streams, triton_ops
from specache_fx.runtime.native.launches import launch
from specache_fx.runtime.transfer.base import CopyMetrics, Transfer
from specache_fx.runtime.transfer.staging import Staging

_TOKENS_AT_ONCE = 64


class KernelTransfer(Transfer):
    """Kernels copy on the current stream, beside nothing. Args as `Transfer`; the device reads the host's rows.

    Attributes:
        tables: Where the device finds the rows of all layers.
    """

    def __init__(self, host: HostCache, top_k: int, device: torch.device) -> None:
        super().__init__(host, top_k, device)
        # Rows that came, rows that stayed, tokens that the host did not hold; by layer, for their rows differ in size.
        self._counters: dict[int, torch.Tensor] = {}
        self.tables = host.tables_on(device)
        # By shape: layers are copied one after the other, so that they share it.
        self._scratch: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def prefetch_wanted(self, layer: int) -> None:
        """See `Transfer`."""
        self.table(layer)  # where the model's own launches may read it too
        with self.beside(layer):
            self.copy(layer)

    @contextlib.contextmanager
    def beside(self, layer: int) -> Iterator[None]:
        """Launch the block behind the current stream's work so far, and beside its later work.

        Args:
            layer: Whose slots the block fills.
        """
        yield

    def copy(self, layer: int, told: torch.Tensor | None = None) -> None:
        """Bring the rows that the layer's slots want, on the current stream.

        Args:
            layer: Layer number.
            told: Tokens that the host holds, int32 `[1]` on the device; None: as many as it holds now.
        """
        from specache_fx.runtime.kernels.triton.gather import launch_copy, plan_slots

        staging, table = self.staging(layer), self.table(layer)
        counters, (missing, source) = self._of(layer, staging)
        batch, heads, top_k = staging.wanted.shape
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
                length=self.host.length(layer) if told is None else 0,
                top_k=top_k,
                LENGTHS_IN_MEMORY=told is not None,
                BLOCK=min(_TOKENS_AT_ONCE, triton_ops.power_of_two(top_k)),
            )
            launch_copy(staging.rows, staging.indices, missing, source, table)

    def table(self, layer: int) -> torch.Tensor:
        """Where the device finds a layer's rows; see `HostCache.table`."""
        return self.tables.copy_of(layer, self.host.table(layer))

    @property
    def metrics(self) -> CopyMetrics:
        """See `Transfer`."""
        total = CopyMetrics()
        for layer, counters in self._counters.items():
            came, stayed, wrong = counters.tolist()
            if wrong:
                raise SpecacheError(
                    f"{wrong} tokens were to be prefetched for layer {layer} that its host tier does not hold: their"
                    " slots stayed empty. This is a bug of specache_fx: please report it."
                )
            total.count(came, stayed, self.staging(layer).row_bytes)
        return total

    @property
    def device_bytes(self) -> int:
        """See `Transfer`."""
        counters = sum(counter.nbytes for counter in self._counters.values())
        scratch = sum(part.nbytes for pair in self._scratch.values() for part in pair)
        return super().device_bytes + self.tables.nbytes + counters + scratch

    def _of(self, layer: int, staging: Staging) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        shape = tuple(staging.wanted.shape)
        with torch.inference_mode(False):
            if layer not in self._counters:
                self._counters[layer] = torch.zeros(3, dtype=torch.int64, device=self._device)
            if shape not in self._scratch:
                self._scratch[shape] = torch.empty_like(staging.wanted), torch.empty_like(staging.wanted)
        return self._counters[layer], self._scratch[shape]


class CudaTransfer(KernelTransfer):
    """The kernels copy on a side stream, beside compute. Args as `KernelTransfer`; the host's rows are page-locked."""

    def __init__(self, host: HostCache, top_k: int, device: torch.device) -> None:
        super().__init__(host, top_k, device)
        self._stream = cuda_streams.lend(self, device)
        # Dropped without `close`: what the kernels read and write must not be given to others meanwhile.
        # A captured step makes its copies on the stream that replays it, so all streams count.
        weakref.finalize(self, cuda_streams.synchronize, device).atexit = False

    @contextlib.contextmanager
    def beside(self, layer: int) -> Iterator[None]:
        """See `KernelTransfer`."""
        staging = self.staging(layer)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            if not torch.cuda.is_current_stream_capturing():  # else the event is known in the graph alone
                staging.done = staging.done or torch.cuda.Event()
                staging.done.record(self._stream)
        if self.synchronous:
            self.join()

    def join(self) -> None:
        """See `Transfer`."""
        # A capture may wait for captured work alone. Beside this one there may be none (lookahead "none"); and what was
        # launched before it is behind another `join`, of the step that is captured (`DecodeStep.running`).
        if torch.cuda.is_current_stream_capturing() and not cuda_streams.is_capturing(self._stream):
            return
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @property
    def metrics(self) -> CopyMetrics:
        """See `Transfer`."""
        self._stream.synchronize()
        return super().metrics

    def _wait(self, layer: int) -> None:
        self.staging(layer).order()

    def _drain(self, layer: int) -> None:
        cuda_streams.synchronize(self._device)  # replayed steps record no events

    def _shutdown(self) -> None:
        cuda_streams.synchronize(self._device)

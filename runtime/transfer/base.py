"""`Transfer`: a session's interface to its copies, and the slots that all of them fill."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specache_fx.errors import HostMemoryError, SpecacheError
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.transfer.staging import Staging


@dataclass
class CopyMetrics:
    """Counters of a transfer; up to date for a layer after its `wait`.

    Attributes:
        fetched_rows: Rows (a key with its value) brought from the host.
        reused_rows: Rows asked for that were staged already.
        fetched_bytes: Bytes of the fetched rows.
        reused_bytes: Bytes of the reused rows, which were not moved.
        copy_seconds: Time of the copies on the thread that made them.
        waited_seconds: Time waited for them.
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


class Transfer:
    """The copies of one session: `prefetch` starts one, `wait` orders readers of its rows behind it.

    A layer's copies are made in the order of its prefetches. Not locked: one thread calls the methods. A subclass says
    how slots are filled (`prefetch_wanted`), and when that is through (`_wait`, `_drain`, `_shutdown`).

    Args:
        host: Where the rows come from; its blocks stay while copies are under way.
        top_k: Slots of each layer, batch row and kv head.
        device: Where the rows go.

    Attributes:
        host: See above.
        synchronous: Let nothing run beside a copy: `prefetch` returns, or what comes next on the current stream runs,
            when it is through (`docs/laws.md`, law 3, compares the two).
    """

    def __init__(self, host: HostCache, top_k: int, device: torch.device) -> None:
        self.host, self.synchronous = host, False
        self._top_k, self._device = top_k, device
        self._metrics = CopyMetrics()
        self._staging: dict[int, Staging] = {}
        self._closed = False

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: the slots, and other memory of the copies."""
        return sum(staging.nbytes for staging in self._staging.values())

    @property
    def metrics(self) -> CopyMetrics:
        """The counters; waits for the device where it copies by itself.

        Raises:
            SpecacheError: If the device was asked for a token that the host does not hold.
        """
        return self._metrics

    def staging(self, layer: int) -> Staging:
        """The layer's slots, allocated when they are asked for first."""
        if layer not in self._staging:
            num_kv_heads, key_dim, value_dim = self.host.shapes[layer]
            shape = (self.host.batch, num_kv_heads, self._top_k)
            try:
                made = Staging.empty(shape, key_dim + value_dim, self.host.dtype, self._device)
            except RuntimeError as error:
                if self._device.type != "cpu":  # CUDA's error says what is needed
                    raise
                raise HostMemoryError(
                    f"There is no memory for top_k={self._top_k} prefetched pairs a layer: lower top_k."
                ) from error
            self._staging[layer] = made
        return self._staging[layer]

    def prefetch(self, layer: int, indices: torch.Tensor) -> None:
        """Start to bring rows to the layer's slots. Rows that are there stay in their slots and are not copied.

        Args:
            layer: Layer number.
            indices: int32 `[batch, num_kv_heads, top_k]` on the device: tokens that the host holds, unique in a row;
                -1 is none. The caller may overwrite it at once.

        Raises:
            SpecacheError: If the transfer is closed.
            Exception: What the copy failed with, where it is made at once (the slots are as they were); or what the
                last one failed with, where a thread made it.
        """
        if self._closed:
            raise SpecacheError("This transfer is closed: its session has ended.")
        self._wait(layer)  # the last copy may still read `wanted`
        # A copy of our own: a compiled graph reuses the caller's buffer without asking.
        self.staging(layer).wanted.copy_(indices)
        self.prefetch_wanted(layer)

    def prefetch_wanted(self, layer: int) -> None:
        """As `prefetch`, of the indices that are in the layer's slots already; no copy of it is under way."""
        raise NotImplementedError

    def wait(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Order later work on the current stream (or thread) behind the layer's last prefetch.

        Returns:
            rows `[batch, num_kv_heads, top_k, key_dim + value_dim]` and indices int32 `[batch, num_kv_heads, top_k]`,
            on the device, valid until the layer's next prefetch. An empty slot has index -1, and a row that means
            nothing. All are empty before the first prefetch.

        Raises:
            Exception: Whatever the copy failed with, once; the slots are empty then.
        """
        self._wait(layer)
        staging = self.staging(layer)
        return staging.rows, staging.indices

    def join(self) -> None:
        """Order later work on the current stream behind all that was launched beside it."""

    def reset(self, layer: int) -> None:
        """Empty the layer's slots: the tokens there are about to change (crop, extend).

        Raises:
            Exception: As `wait`.
        """
        if layer in self._staging:
            self._drain(layer)
            self._staging[layer].clear()

    def reorder(self, batch_rows: torch.Tensor) -> None:
        """Reorder the batch rows of every layer's slots: row i becomes a copy of row `batch_rows[i]`.

        Args:
            batch_rows: int64 `[batch]` on the device.

        Raises:
            Exception: As `wait`.
        """
        for layer, staging in self._staging.items():
            self._drain(layer)
            staging.reorder(batch_rows)

    def close(self) -> None:
        """Wait for the copies under way, then let go of the slots; twice is fine. Errors end here."""
        self._closed = True
        self._shutdown()
        self._staging.clear()

    def _wait(self, layer: int) -> None:
        """Order later work behind the layer's last copy; raise its error."""

    def _drain(self, layer: int) -> None:
        """As `_wait`, and nothing reads the host's rows any more: they may change."""
        self._wait(layer)

    def _shutdown(self) -> None:
        """Return when no copy is under way, and none can come."""

"""`HostCache`: the 16-bit KV pairs of one session, off the device.

One row for each (batch row, kv head, token) holds K and V side by side, so that a pair is one contiguous
read; V alone where the policy keeps the keys on the device (`key_dim` is 0 then). A layer's rows live in blocks,
`[batch, num_kv_heads, block tokens, key_dim + value_dim]` each: growing adds a block and moves nothing.
`host_blocks` makes the blocks: page-locked memory, plain memory, a mapped file.

Paper: SpeCache §3.2 (the 16-bit cache is offloaded to CPU memory).
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from specache_fx.errors import HostMemoryError, SpecacheError
from specache_fx.runtime.host.device_tables import DeviceTables
from specache_fx.runtime.host.host_blocks import STORES
from specache_fx.runtime.native import cuda_streams

ALIGN_TOKENS = 64
_LEAST_BLOCKS = 31  # that a table has room for


RowShape = tuple[int, int, int]
"""A layer's `(num_kv_heads, key_dim, value_dim)`."""


class _Rows:
    """One layer's blocks. Block i holds the tokens from `starts[i]` up to `starts[i + 1]`."""

    def __init__(self, shape: RowShape) -> None:
        self.num_kv_heads, self.key_dim, self.value_dim = shape
        self.dim = self.key_dim + self.value_dim
        self.blocks: list[torch.Tensor] = []
        self.starts: list[int] = [0]
        self.table = torch.zeros(2 + 2 * _LEAST_BLOCKS, dtype=torch.int64, device="cpu")
        self.length = 0
        self.next_block: Future[torch.Tensor] | None = None  # being reserved by a thread

    def attach(self, block: torch.Tensor) -> None:
        """Add a block at the end."""
        self.blocks.append(block)
        self.starts.append(self.starts[-1] + block.shape[2])
        told = [len(self.blocks)]
        for start, each in zip(self.starts, self.blocks, strict=False):
            told += [start, each.data_ptr()]
        told.append(self.starts[-1])
        room = len(self.table) if len(told) <= len(self.table) else 2 * len(told)
        self.table = torch.tensor(told + [0] * (room - len(told)), dtype=torch.int64, device="cpu")

    def parts(self, start: int, stop: int) -> list[tuple[torch.Tensor, slice, slice]]:
        """The blocks that hold tokens `start` to `stop`: each with its slice inside and its slice outside."""
        parts = []
        index = bisect.bisect_right(self.starts, start) - 1
        at = start
        while at < stop:
            first, end = self.starts[index], min(self.starts[index + 1], stop)
            parts.append((self.blocks[index], slice(at - first, end - first), slice(at - start, end - start)))
            at, index = end, index + 1
        return parts


def row_bytes(rows: torch.Tensor) -> np.ndarray:
    """`[..., dim]`, contiguous, as uint8 `[rows, bytes of a row]`; shares memory."""
    return rows.view(-1, rows.shape[-1]).view(torch.uint8).numpy()


def _aligned(tokens: int) -> int:
    return -(-tokens // ALIGN_TOKENS) * ALIGN_TOKENS


def _send(target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy rows from the device: no wait and no buffer between, for each head's lie in one piece on both sides.

    Args:
        target: `[batch, num_kv_heads, tokens, dim]` of a block: page-locked, or the copy waits.
        pairs: The same on the device.
    """
    targets = target.flatten(0, 1).unbind()
    torch._foreach_copy_(targets, pairs.flatten(0, 1).unbind(), non_blocking=True)


class HostCache:
    """Rows of every layer of one session; see the module's docstring for the layout.

    Not locked: one thread appends and truncates. Another may gather at the same time, of tokens that are
    neither truncated nor yet to come (`Transfer.reset` comes before `truncate`).

    Args:
        batch: Batch rows.
        shapes: `(num_kv_heads, key_dim, value_dim)` of each layer.
        dtype: The KV dtype.
        host: "pinned", "memory" or "disk"; `resolve_host` turns "auto" into one of them.
        host_dir: Folder for "disk"; see `machine_memory.disk_folder`.
        block_tokens: Tokens that a layer grows by at most, unless more are appended at once. It grows by a quarter of
            what it has room for; the first block is sized for the first append (prefill).
        reserve: Tokens that a layer's first block has room for at least.
        device: Where the model runs; a thread locks pages for it. None: the current device of each thread.

    Attributes:
        num_read: int64 `[2]` on the CPU, the keys and values that its kernels have read (`Originals`): they count.
    """

    def __init__(
        self,
        batch: int,
        shapes: Sequence[RowShape],
        dtype: torch.dtype,
        host: str = "memory",
        host_dir: str | None = None,
        *,
        block_tokens: int = 1024,
        reserve: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.batch, self.shapes, self.dtype = batch, tuple(shapes), dtype
        self.num_read = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.block_tokens, self._reserved = block_tokens, reserve
        self._layers = [_Rows(shape) for shape in self.shapes]
        self._store = STORES[host](host_dir, device)
        self.is_pinned = host == "pinned"  # a CUDA device can read the blocks by itself
        self.in_memory = host != "disk"  # reading a row takes no longer than its bytes do
        # Before the room is needed: with the prompt what decoding will ask for first, then in a thread when half of
        # the newest block is filled. Page-locked memory takes a second a few gigabytes: at batch 64 a step would wait.
        self._ahead = self.is_pinned
        self._thread: ThreadPoolExecutor | None = None
        self._written: torch.cuda.Event | None = None  # CUDA: behind the last rows that come from the device
        self._tables: dict[torch.device, DeviceTables] = {}
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes reserved for all layers, filled or not."""
        return self._store.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens that the layers hold."""
        row_sizes = (rows.length * rows.num_kv_heads * rows.dim for rows in self._layers)
        return self.batch * sum(row_sizes) * self.dtype.itemsize

    def length(self, layer: int) -> int:
        """Tokens that a layer holds."""
        return self._layers[layer].length

    def table(self, layer: int) -> torch.Tensor:
        """The addresses of a layer's rows, for kernels that read them.

        Returns:
            int64, one-dimensional, on the CPU: the number of blocks; of each its first token and its address; one past
            the last token; zeros. A block is `[batch, num_kv_heads, tokens of the block, key_dim + value_dim]`. The
            table never changes: a block that comes later makes another one, and a thread that reads this one finds
            what was there. A table is as long as the one before while all blocks fit.
        """
        self._check_open()
        return self._layers[layer].table

    def tables_on(self, device: torch.device) -> DeviceTables:
        """The tables on a device that reads the rows by itself."""
        if device not in self._tables:
            self._tables[device] = DeviceTables(device)
        return self._tables[device]

    def readable(self, layer: int, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`table` on an attention's device, None where that can't read the rows; and the counts that it adds to."""
        if device.type == "cpu":
            return self.table(layer), self.num_read
        if not self.is_pinned:
            return None, self.num_read
        tables = self.tables_on(device)
        return tables.copy_of(layer, self.table(layer)), tables.num_read

    def count_read(self) -> list[int]:
        """Keys and values that attention has read where they lie; waits for the devices that count."""
        counts = [self.num_read, *(tables.num_read for tables in self._tables.values())]
        return [sum(each) for each in zip(*(count.tolist() for count in counts), strict=True)]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put tokens at a layer's end; all of them, or none where it raises.

        Args:
            layer: Layer number.
            k: `[batch, num_kv_heads, tokens, key_dim]` of the KV dtype, any device, any strides.
            v: `[batch, num_kv_heads, tokens, value_dim]`, likewise.

        Raises:
            HostMemoryError: If the bytes can't be had. Rows that were there stay readable.
        """
        self._check_open()
        rows, tokens = self._layers[layer], k.shape[2]
        for name, x, dim in (("k", k, rows.key_dim), ("v", v, rows.value_dim)):
            expected = (self.batch, rows.num_kv_heads, tokens, dim)
            if tuple(x.shape) != expected or x.dtype != self.dtype:
                raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected {self.dtype} {expected}.")
        self._reserve(rows, rows.length + tokens)
        parts = rows.parts(rows.length, rows.length + tokens)
        if k.device.type == "cpu":
            for block, inside, outside in parts:
                block[:, :, inside, : rows.key_dim].copy_(k.detach()[:, :, outside])
                block[:, :, inside, rows.key_dim :].copy_(v.detach()[:, :, outside])
        else:
            pairs = torch.cat([k.detach(), v.detach()], dim=-1)
            for block, inside, outside in parts:
                _send(block[:, :, inside], pairs[:, :, outside])
            self._note_written(k.device)
        rows.length += tokens

    def _note_written(self, device: torch.device) -> None:
        """Have readers of rows on the CPU, and whoever frees them, wait for the copies sent until now."""
        if device.type != "cuda":
            return
        if self._written is None:
            self._written = torch.cuda.Event()
            # Dropped without `close`: the device must not write into memory that others have got.
            weakref.finalize(self, self._written.synchronize).atexit = False
        self._written.record(torch.cuda.current_stream(device))

    def _drain(self) -> None:
        """Return when the rows that were appended are there."""
        if self._written is not None:
            self._written.synchronize()

    def read(
        self, layer: int, start: int, stop: int, into: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the tokens from `start` to `stop` out.

        Args:
            layer: Layer number.
            start: The first.
            stop: Behind the last.
            into: Where they go, on any device; None for new tensors on the CPU.

        Returns:
            k `[batch, num_kv_heads, stop - start, key_dim]` and v `[..., value_dim]`, the caller's own.
        """
        self._check_open()
        self._drain()
        rows = self._layers[layer]
        if not 0 <= start <= stop <= rows.length:
            raise IndexError(f"Tokens {start} to {stop} of layer {layer}, which holds {rows.length}.")
        if into is None:
            shape = (self.batch, rows.num_kv_heads, stop - start)
            dims = rows.key_dim, rows.value_dim
            k, v = (torch.empty(*shape, dim, dtype=self.dtype, device="cpu") for dim in dims)
        else:
            k, v = into
        for block, inside, outside in rows.parts(start, stop):
            k[:, :, outside] = block[:, :, inside, : rows.key_dim]
            v[:, :, outside] = block[:, :, inside, rows.key_dim :]
        return k, v

    def gather_rows(
        self, layer: int, batch_idx: torch.Tensor, head_idx: torch.Tensor, token_idx: torch.Tensor
    ) -> torch.Tensor:
        """Copy single rows out.

        Args:
            layer: Layer number.
            batch_idx: int64 `[n]` on the CPU.
            head_idx: int64 `[n]` on the CPU: kv heads.
            token_idx: int64 `[n]` on the CPU.

        Returns:
            `[n, key_dim + value_dim]` of the KV dtype, on the CPU.
        """
        self._check_open()
        self._drain()
        rows = self._layers[layer]
        row = batch_idx.numpy() * rows.num_kv_heads + head_idx.numpy()
        token = token_idx.numpy()
        outside = token[(token < 0) | (token >= rows.length)]
        if outside.size:
            raise IndexError(f"Token {outside[0]} of layer {layer}, which holds {rows.length}.")
        out = torch.empty(token.size, rows.dim, dtype=self.dtype, device="cpu")
        block_idx = np.searchsorted(rows.starts[1:], token, side="right")
        for index in np.unique(block_idx).tolist():
            here = np.flatnonzero(block_idx == index)
            block = rows.blocks[index]
            place = row[here] * block.shape[2] + token[here] - rows.starts[index]
            # NumPy, not `index_select`: the copy thread runs beside a forward pass that has every core, where an
            # OpenMP team is slow to gather.
            row_bytes(out)[here] = row_bytes(block).take(place, axis=0)
        return out

    def reorder(self, layer: int, batch_rows: torch.Tensor) -> None:
        """Set batch row i to the former row `batch_rows[i]`, int64 `[batch]` on the CPU; moves changed rows only."""
        self._check_open()
        self._drain()
        rows = self._layers[layer]
        changed = (batch_rows != torch.arange(self.batch, device="cpu")).nonzero().flatten()
        if not len(changed):
            return
        for block, inside, _ in rows.parts(0, rows.length):
            block[changed, :, inside] = block[batch_rows[changed], :, inside]

    def parts(self, layer: int) -> list[torch.Tensor]:
        """A layer's rows in order, `[batch, num_kv_heads, tokens, key_dim + value_dim]` each; views, no copy."""
        self._check_open()
        self._drain()
        rows = self._layers[layer]
        return [block[:, :, inside] for block, inside, _ in rows.parts(0, rows.length)]

    def fill(self, layer: int, parts: Sequence[torch.Tensor]) -> None:
        """Give a layer that is empty the rows of `parts`, on the CPU, in one block.

        Raises:
            HostMemoryError: If the bytes can't be had.
            ValueError: If they have another shape or dtype than the layer's rows.
        """
        self._check_open()
        rows = self._layers[layer]
        lengths = [part.shape[2] for part in parts]
        for part, length in zip(parts, lengths, strict=True):
            expected = (self.batch, rows.num_kv_heads, length, rows.dim)
            if tuple(part.shape) != expected or part.dtype != self.dtype:
                found = f"{part.dtype} {tuple(part.shape)}"
                raise ValueError(f"rows of layer {layer} are {found}: expected {self.dtype} {expected}")
        self._reserve(rows, sum(lengths))
        if parts:
            torch.cat(list(parts), 2, out=rows.blocks[0][:, :, : sum(lengths)])
        rows.length = sum(lengths)

    def truncate(self, layer: int, tokens: int) -> None:
        """Forget a layer's newest tokens, so that `tokens` remain. Their space stays: appends will follow."""
        rows = self._layers[layer]
        if not 0 <= tokens <= rows.length:
            raise IndexError(f"Layer {layer} can't be cut to {tokens} tokens: it holds {rows.length}.")
        rows.length = tokens

    def close(self) -> None:
        """Give every byte back. Reading or appending afterwards is an error; closing again is not."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._drain()
        for device in self._tables:
            if device.type == "cuda":
                cuda_streams.synchronize(device)  # launches may still read the rows
        self._layers = [_Rows(shape) for shape in self.shapes]
        self._store.close()

    @staticmethod
    def first_bytes(batch: int, shapes: Sequence[RowShape], dtype: torch.dtype, tokens: int) -> int:
        """Bytes that a first append of `tokens` to every layer reserves."""
        row = sum(num_kv_heads * (key_dim + value_dim) for num_kv_heads, key_dim, value_dim in shapes)
        return batch * _aligned(tokens) * row * dtype.itemsize

    def reserve(self, layer: int) -> None:
        """Have room for the tokens that `reserve` asks for, before any are appended.

        Raises:
            HostMemoryError: If there is none.
        """
        self._reserve(self._layers[layer], self._reserved)

    def _reserve(self, rows: _Rows, tokens: int) -> None:
        if rows.next_block is not None and tokens > rows.starts[-1]:
            future, rows.next_block = rows.next_block, None
            with contextlib.suppress(HostMemoryError):  # asked for again below, in the size that is needed
                rows.attach(future.result())
        missing = tokens - rows.starts[-1]
        if missing > 0:
            first = not rows.blocks
            least = self._reserved if first else 0
            rows.attach(self._allocate(rows, max(missing, least, self._growth(rows.starts[-1]))))
            if first and self._ahead:
                try:
                    rows.attach(self._allocate(rows, self._growth(tokens)))
                except HostMemoryError:
                    return  # the prompt fits: what comes may yet
        half_full = tokens > (rows.starts[-1] + rows.starts[-2]) // 2 if len(rows.starts) > 1 else False
        if self._ahead and half_full and rows.next_block is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "specache-reserve")
            with contextlib.suppress(RuntimeError):  # the interpreter exits: see `WorkerTransfer`
                rows.next_block = self._thread.submit(self._allocate, rows, self._growth(rows.starts[-1]))

    def _growth(self, tokens: int) -> int:
        """Tokens by which a layer with room for `tokens` grows: a short cache shouldn't reserve many times itself."""
        return min(self.block_tokens, tokens // 4)

    def _allocate(self, rows: _Rows, tokens: int) -> torch.Tensor:
        return self._store.allocate(
            (self.batch, rows.num_kv_heads, _aligned(max(tokens, 1)), rows.dim), self.dtype
        )

    def _check_open(self) -> None:
        if self._closed:
            raise SpecacheError("This host cache is closed: its session has ended.")

"""`Staging`: a layer's prefetched rows on the device, and how the next ones find their slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Staging:
    """The `top_k` slots of one layer.

    Attributes:
        rows: `[batch, num_kv_heads, top_k, key_dim + value_dim]` of the KV dtype, on the device.
        indices: int32 `[batch, num_kv_heads, top_k]` on the device: the token in each slot, -1 where it is
            empty.
        slots: The same on the CPU; the same tensor where the device is the CPU.
        wanted: int32 like `indices`, on the device: the transfer's own copy of the last request.
        done: CUDA: recorded on the copy stream after the last copy.
    """

    rows: torch.Tensor
    indices: torch.Tensor
    slots: torch.Tensor
    wanted: torch.Tensor
    done: torch.cuda.Event | None = None

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int], row_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Staging:
        """Slots that hold nothing; `shape` is `(batch, num_kv_heads, top_k)`."""
        # Not inference tensors, whoever asks first: they are written by a thread of its own, and read in any
        # mode.
        with torch.inference_mode(False):
            slots = torch.full(shape, -1, dtype=torch.int32, device="cpu")
            return cls(
                # Zeros: kernels may multiply what an empty slot holds by 0, and NaN would survive that.
                rows=torch.zeros(*shape, row_dim, dtype=dtype, device=device),
                indices=slots if device.type == "cpu" else slots.to(device),
                slots=slots,
                wanted=torch.full(shape, -1, dtype=torch.int32, device=device),
            )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.rows.nbytes + self.indices.nbytes + self.wanted.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.rows.shape[-1] * self.rows.element_size()

    def order(self) -> None:
        """CUDA: order later work on the current stream behind the last copy."""
        if self.done is not None:
            torch.cuda.current_stream(self.rows.device).wait_event(self.done)

    def reorder(self, batch_rows: torch.Tensor) -> None:
        """Row i becomes a copy of row `batch_rows[i]`, int64 `[batch]` on the device. No copy may be under way."""
        for tensor in (self.rows, self.indices, self.wanted):
            tensor.copy_(tensor.index_select(0, batch_rows))
        if self.slots is not self.indices:
            self.slots.copy_(self.slots.index_select(0, batch_rows.cpu()))

    def clear(self) -> None:
        """Empty every slot. No copy may be under way."""
        self.slots.fill_(-1)
        self.indices.fill_(-1)


@dataclass(frozen=True)
class SlotPlan:
    """The changes between two selections; every tensor is on the CPU.

    Attributes:
        slots: int32 `[batch, num_kv_heads, top_k]`: the token in each slot afterwards, -1 where it is empty.
        batch_idx: int64 `[n]`: of each row to fetch.
        head_idx: int64 `[n]`.
        token_idx: int64 `[n]`.
        slot_idx: int64 `[n]`: where it goes, counted over all of `slots` flattened.
        num_kept: Rows that stay where they are.
    """

    slots: torch.Tensor
    batch_idx: torch.Tensor
    head_idx: torch.Tensor
    token_idx: torch.Tensor
    slot_idx: torch.Tensor
    num_kept: int


def plan_slots(staged: torch.Tensor, wanted: torch.Tensor) -> SlotPlan:
    """Give every wanted token a slot: the one that it has, or one whose token is no longer wanted.

    By sorting, not by comparing all with all: `top_k` may be as large as the context. In NumPy: the copy
    thread runs beside a forward pass that has every core, where an OpenMP team is slow to gather.

    Args:
        staged: int32 `[batch, num_kv_heads, top_k]` on the CPU: the token in each slot, -1 where it is empty.
        wanted: The same shape: the tokens to hold, unique in a row, in any order; -1 is none.
    """
    num_kv_heads, top_k = staged.shape[1:]
    old, new = staged.reshape(-1).numpy(), wanted.reshape(-1).numpy()
    row = np.arange(old.size) // top_k
    # One sorted list for all rows; an empty slot's key, one below its row's first token, is nobody's.
    old_key, new_key = (row << 32) + old, (row << 32) + new
    order = old_key.argsort()
    at = np.minimum(np.searchsorted(old_key, new_key, sorter=order), old.size - 1)
    held = (new >= 0) & (old_key[order[at]] == new_key)
    keep = np.zeros(old.size, dtype=bool)
    keep[order[at[held]]] = True
    # In each row the i-th missing token takes the i-th free slot. Tokens that stay and tokens that come are
    # top_k together at most, so the free slots suffice.
    missing, free = np.flatnonzero((new >= 0) & ~held), np.flatnonzero(~keep)
    missing_row = row[missing]
    rank = np.arange(missing.size) - np.searchsorted(missing_row, missing_row)
    slot_idx = free[np.searchsorted(row[free], missing_row) + rank]
    slots = np.where(keep, old, np.int32(-1))
    slots[slot_idx] = new[missing]
    return SlotPlan(
        slots=torch.from_numpy(slots).view(staged.shape),
        batch_idx=torch.from_numpy(missing_row // num_kv_heads),
        head_idx=torch.from_numpy(missing_row % num_kv_heads),
        token_idx=torch.from_numpy(new[missing].astype(np.int64)),
        slot_idx=torch.from_numpy(slot_idx),
        num_kept=int(held.sum()),
    )

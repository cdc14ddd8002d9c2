"""Tiles of 16-bit rows as Triton's decode kernels read them: in their natural order, 16 bytes a load.

The rows of a head are counted over three places: staged ones, the window's, and each lane's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # of a part


@triton.jit
def row_positions(row, stop, indices, top_k, num_quantized):
    """The token of each row, the lanes' own behind the last; -1 where the slot is empty, and from `stop` on."""
    ok = row < stop
    staged = tl.load(indices + row, mask=ok & (row < top_k), other=-1)
    return tl.where(ok & (row >= top_k), num_quantized + row - top_k, staged)


@triton.jit
def row_tile(
    places,
    row,
    counts,
    own_stride,
    ROW: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """16-bit rows, `[PARTS, rows, columns]`.

    Args:
        places: Staged rows of ROW elements, of which the first DIM are read; the window's, of DIM elements; the lanes'
            own, `own_stride` elements from lane to lane.
        row: Numbers of the rows, `[PARTS, rows]`.
        counts: How many rows the three places have.
        own_stride: See `places`.
        ROW: See `places`.
        DIM: Channels.
        PAD: Columns.
        DOT: dtype of the tile.
    """
    staged, window, own = places
    top_k, window_len, lanes = counts
    at = row.to(tl.int64)
    in_window = at - top_k
    lane = in_window - window_len
    channel = tl.arange(0, PAD)[None, None, :]
    # One load from where the row lies: a load for each of the three places takes three times the registers. Channels
    # are added before the choice, after which the compiler may not know that rows are aligned.
    here = tl.where(
        (at < top_k)[:, :, None],
        staged + (at * ROW)[:, :, None] + channel,
        tl.where(
            (lane < 0)[:, :, None],
            window + (in_window * DIM)[:, :, None] + channel,
            own + (lane * own_stride)[:, :, None] + channel,
        ),
    )
    ok = (lane < lanes)[:, :, None]
    if DIM != PAD:
        ok = ok & (channel < DIM)
    return tl.load(here, mask=ok, other=0).to(DOT)

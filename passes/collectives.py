"""Tensor parallelism in the graph: a model's weights on many processes, and the collectives that join what they give.

Each process rewrites its own graph. Attention is local to a process's heads, so its cache holds those heads. All
processes see the same logits, and so guess the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from specache_fx.passes.graph_utils import target_name

# Which dimension of the input an operator joins or cuts: with the lanes behind it, one call serves all of them.
_ALONG_ROWS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_ELEMENTWISE = ("all_reduce", "broadcast")
_SELECTIONS = {"index_put", "masked_fill", "where", "mul"}


def full_rows(embedding: Node, rows: int, logits: set[int]) -> int:
    """The rows of an embedding's whole table.

    A table is sharded by rows where its result is summed over processes. `torch.chunk` cuts it: all shards but the last
    ones are equally long.

    Args:
        embedding: The node.
        rows: Rows of this process's shard.
        logits: Last dimensions of the graph's results: what a whole table may have.

    Returns:
        `rows` where the table is whole, or where no result has as many numbers.
    """
    node = embedding
    while True:
        users = list(node.users)
        if summed := next((user for user in users if target_name(user) == "all_reduce"), None):
            break
        masked = [user for user in users if target_name(user) in _SELECTIONS]
        if not masked:
            return rows
        node = masked[0]
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
    group = resolve(summed.args[2])
    for size in sorted(logits):
        shard = -(-size // group.size())
        if rows == max(0, min(shard, size - shard * group.rank())):
            return size
    return rows


def register_collectives() -> None:
    """Register how collectives take two lanes at once: as one call. Cheap to call again."""
    if torch.distributed.is_available() and hasattr(torch.ops, "_c10d_functional"):
        _register()


@cache
def _register() -> torch.library.Library:
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    for names, place in ((_ELEMENTWISE, 0), (_ALONG_ROWS, 1)):
        for name in names:
            call = getattr(torch.ops._c10d_functional, name).default
            torch.library.register_vmap(f"_c10d_functional::{name}", _rule(call, place), lib=library)
    torch.library.register_vmap("_c10d_functional::wait_tensor", _wait, lib=library)
    return library  # its rules end with it


def _rule(call: Any, place: int) -> Any:
    def rule(info: Any, in_dims: Sequence[int | None], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return call(x.movedim(in_dims[0], place).contiguous(), *rest), place

    return rule


def _wait(info: Any, in_dims: Sequence[int], x: Tensor) -> tuple[Tensor, int]:
    # It waits for the very tensor: a contiguous copy may come too early.
    return torch.ops._c10d_functional.wait_tensor(x), in_dims[0]

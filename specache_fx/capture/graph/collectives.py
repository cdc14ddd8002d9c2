"""Tensor parallelism in the graph: a model's weights on many processes, and the collectives that join what they give.

Each process rewrites its own graph. Attention is local to a process's heads, so its cache holds those heads. All
processes see the same logits, and so guess the same token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from specache_fx.capture.graph.graph_utils import target_name

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

"""The token ids among a graph's inputs: they index a table with a row per logit.

With tensor parallelism the table may be on many processes. Each process rewrites its own graph. Attention is local to a
process's heads, so its cache holds those heads. All processes see the same logits, and so guess the same token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    is_integer_tensor,
    is_static_input,
    placeholders,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.positions.newest_tokens import NEWEST_OF

_SELECTIONS = {"index_put", "masked_fill", "where", "mul"}
_SAME_TOKENS = {"reshape", "unsqueeze", "squeeze", "_to_copy", "clone", "index_put", "masked_fill", "where"}
_SAME_TOKENS |= {"sub"}  # where a shard of a table begins


class Token(NamedTuple):
    """The input of token ids; None and None where a graph takes none.

    Attributes:
        node: It.
        vocabulary: Rows of its table of embeddings.
    """

    node: Node | None
    vocabulary: int | None


def find_token(graph: Graph) -> Token:
    """The integer input that indexes an embedding whose table has a row per logit, and the table's rows.

    Where processes share a table, that is the whole table.
    """
    shapes = [shape_of(out) for out in graph.output_node().all_input_nodes]
    last_dims = {shape[-1] for shape in shapes if shape and isinstance(shape[-1], int)}
    others = [node for node in graph.nodes if target_name(node) not in _SAME_TOKENS]
    tables = [
        (_full_rows(node, int(value_of(node.args[0]).shape[0]), last_dims), ancestors([node.args[1]], others))
        for node in graph.nodes
        if target_name(node) == "embedding" and isinstance((shape_of(node.args[0]) or (None,))[0], int)
    ]
    found = [
        (start, rows)
        for start in placeholders(graph)
        for rows, behind in tables
        if start in behind and is_integer_tensor(start) and not is_static_input(start)
    ]
    best = max(found, key=lambda each: (each[1] in last_dims, NEWEST_OF in each[0].meta), default=None)
    return Token(None, None) if best is None else Token(*best)


def _full_rows(embedding: Node, rows: int, logits: set[int]) -> int:
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

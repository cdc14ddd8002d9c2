"""Attention sinks that are written as a gate behind the attention instead of a column before the softmax.

    gate = sigmoid(logsumexp(s, -1) - sinks);  out = (softmax(s) @ v) * gate[..., None]
        = softmax(cat([s, sinks]))[..., :-1] @ v

since sigmoid(log(sum e^s) - b) = sum e^s / (sum e^s + e^b) (granite_swa).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from specache_fx.capture.graph_slices import ancestors
from specache_fx.capture.graph_utils import is_static_input, shape_of, target_name
from specache_fx.capture.score_ops import CASTS, RESHAPES, real_users


@dataclass(frozen=True)
class SinkGate:
    """What was read.

    Attributes:
        output: The gated output.
        sinks: `[num_heads]`, computed from parameters alone.
        inner: All nodes from the scores, the output and the sinks to the gated output, that included.
    """

    output: Node
    sinks: Node
    inner: frozenset[Node]


def _strip(node: Any, names: set[str], path: set[Node]) -> Any:
    """The node behind casts and reshapes, which are added to `path`."""
    while isinstance(node, Node) and target_name(node) in names:
        path.add(node)
        node = node.args[0]
    return node


def _is_logsumexp(node: Any, scores: Node) -> bool:
    if not isinstance(node, Node) or target_name(node) != "logsumexp":
        return False
    same = _strip(node.args[0], CASTS, set()) is _strip(scores, CASTS, set())
    return same and node.args[1] in ([-1], [len(shape_of(scores) or ()) - 1])


def sink_gate(scores: Node, output: Node, num_heads: int) -> SinkGate | None:
    """Find the gate of an attention.

    Args:
        scores: What its softmax reads.
        output: The product of its probabilities and values.
        num_heads: Its query heads.

    Returns:
        The gate; None where there is none in this form.
    """
    users = real_users(output)
    if len(users) != 1 or target_name(users[0]) != "mul" or len(users[0].args) != 2:
        return None
    gated = users[0]
    path: set[Node] = {gated}
    factor = next((arg for arg in gated.args if arg is not output), None)
    sigmoid = _strip(factor, CASTS | RESHAPES | {"unsqueeze"}, path)
    if not isinstance(sigmoid, Node) or target_name(sigmoid) != "sigmoid":
        return None
    difference = _strip(sigmoid.args[0], CASTS, path)
    if not isinstance(difference, Node) or target_name(difference) != "sub" or len(difference.args) != 2:
        return None
    lse = _strip(difference.args[0], CASTS, path)
    sinks = _strip(difference.args[1], CASTS | RESHAPES | {"unsqueeze"}, path)
    if not _is_logsumexp(lse, scores) or not isinstance(sinks, Node) or shape_of(sinks) != (num_heads,):
        return None
    if not all(is_static_input(root) for root in ancestors([sinks]) if root.op == "placeholder"):
        return None
    return SinkGate(gated, sinks, frozenset({*path, sigmoid, difference, lse}))

"""One side of an attention, its keys or its values, and what a model caches of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from specache_fx.capture.caches.id_runs import leaves_of
from specache_fx.capture.graph.graph_slices import ancestors, mutated_inputs
from specache_fx.capture.graph.graph_utils import (
    concatenated,
    described,
    is_float,
    newest,
    reads_shape_only,
    same_sizes,
    shape_of,
    shown_shape,
    target_name,
)
from specache_fx.capture.graph.left_alone import GROW, GROWING, LEAVE, LeaveAlone
from specache_fx.capture.program import Side
from specache_fx.runtime.handle_form import MOST_DIMS

ONLY_ATTENTION = f"Let nothing but attention, and cat([past, new], dim=-2), read the cached tensors. {LEAVE}."
_aten = torch.ops.aten
_SAME_TOKENS = {"clone", "_to_copy", "slice"}


def without_repeat(node: Node) -> tuple[Node, list[Node]]:
    """Strip repeat_kv, `reshape(clone(expand(unsqueeze(x, 2), ...)), ...)`.

    A reshape may insert the dimension, too: `x.view(b, h, 1, n, d)`.

    Returns:
        The repeated node, and the nodes that repeat it; the node itself, and none, where it is no repeat.
    """
    chain, copies = [node], []
    for names in (("reshape",), ("expand",), ("unsqueeze", "reshape")):
        if names == ("expand",) and target_name(chain[-1]) == "clone":
            copies.append(chain.pop())
            chain.append(copies[-1].args[0])  # type: ignore[arg-type]
        if target_name(chain[-1]) not in names or not isinstance(chain[-1].args[0], Node):
            return node, []
        chain.append(chain[-1].args[0])
    merged, expanded, inserted, root = (shape_of(step) or () for step in chain)
    front, back = root[:2], root[2:]
    is_repeat = (
        (len(root), len(expanded)) == (4, 5)
        and (target_name(chain[2]) == "reshape" or chain[2].args[1] in (2, -3))
        and same_sizes(inserted, (*front, 1, *back))
        and same_sizes(expanded[:2], front)
        and same_sizes(merged, (front[0], front[1] * expanded[2], *back))
    )
    return (chain[-1], chain[:-1] + copies) if is_repeat else (node, [])


def _kept_slice(root: Node, outputs: set[Node]) -> Node | None:
    """The one slice of keys that is returned in their place."""
    kept = [user for user in root.users if user in outputs and target_name(user) == "slice"]
    return kept[0] if len(kept) == 1 and newest(kept[0]) is not None else None


def is_cache(node: Node, outputs: set[Node]) -> bool:
    """Whether a model returns this 4-D tensor, or its newest tokens."""
    if len(shape_of(node) or ()) != 4:
        return False
    return node in outputs or _kept_slice(node, outputs) is not None


def grows(node: Any) -> bool:
    """Whether a result is a cache with this call's tokens appended, `cat([past, new])`, or the newest part of one."""
    while isinstance(node, Node) and target_name(node) in _SAME_TOKENS and node.args:
        node = node.args[0]
    parts, _ = concatenated(node) or ([], 0)
    if len(parts) < 2 or len(shape_of(node) or ()) not in (3, 4):
        return False
    moved_from = leaves_of(parts[:1])
    return shape_of(parts[0]) == (0,) or any(
        leaf.op == "placeholder" and is_float(leaf) for leaf in moved_from
    )


def _appended(root: Node) -> tuple[Node | None, Node]:
    """The past and the new part of `cat([past, new], -2)`; no past where there is none."""
    parts, dim = concatenated(root) or ([], 0)
    if len(parts) == 2 and dim == 2:
        first, second = parts
        if first.op == "placeholder" and shape_of(first)[2] != 0:  # type: ignore[index]
            return first, second
        if first.op == "placeholder" or shape_of(first) == (0,):
            return None, second
    return None, root


def changed_past(root: Node) -> Node | None:
    """The node that changes the past before this call's tokens are appended to it, `cat([0.9 * past, new], -2)`."""
    parts, dim = concatenated(root) or ([], 0)
    if len(parts) != 2 or dim != 2 or parts[0].op == "placeholder" or shape_of(parts[0]) == (0,):
        return None
    read = [
        node for node in ancestors([parts[0]]) if node.op == "placeholder" and len(shape_of(node) or ()) == 4
    ]
    return parts[0] if read else None


def side_of(root: Node, what: str, outputs: set[Node], inside: set[Node]) -> Side:
    """Describe a cache (`is_cache`).

    Args:
        root: Past and new.
        what: "keys" or "values", for messages.
        outputs: The graph's.
        inside: What may read it: the attentions over it, and what leads to them.

    Raises:
        LeaveAlone: If something else reads it, which handles would not serve.
    """
    past, new = _appended(root)
    output = root if root in outputs else _kept_slice(root, outputs)
    assert output is not None
    for user in root.users:
        if user not in inside and user is not output and user.op != "output" and not reads_shape_only(user):
            if user in _written_values(root.graph):
                raise LeaveAlone(
                    f"its {what} are written into a cache of fixed length: {described(user)}", GROWING
                )
            raise LeaveAlone(f"its {what} are also used by {described(user)}", ONLY_ATTENTION)
    for user in () if past is None else past.users:
        if user is not root and not reads_shape_only(user):
            raise LeaveAlone(f"its past {what} are also used by {described(user)}", ONLY_ATTENTION)
    kept = None if output is root else newest(output)
    return Side(root, new, past, output, None if kept is None else kept + 1)


def why_not_cached(root: Node, what: str, outputs: set[Node]) -> LeaveAlone:
    """The refusal of keys or values that are no cache."""
    shape = shape_of(root)
    if shape is None or len(shape) != 4:
        return LeaveAlone(
            f"its {what} have shape {shown_shape(root)}, not [batch, num_kv_heads, kv_len, head_dim]"
        )
    cut = any(target_name(user) == "slice" and user in outputs for user in root.users)
    if cut or _appended(root)[0] is not None:
        return LeaveAlone(
            f"neither its whole {what} nor the newest of them are what the model returns as its cache",
            f"Return cat([past, new], dim=-2) itself or its last tokens, [:, :, -n:]. {LEAVE}.",
        )
    if (write := _write_before(root)) is not None:
        return LeaveAlone(
            f"its {what} are computed from a cache of fixed length that {described(write)} writes; specache follows"
            " keys and values that are cached themselves, written by index_copy_ or into a slice",
            f"Keep them so, in buffers of their own, [batch, num_kv_heads, max_len, head_dim]. Or {GROW}. {LEAVE}.",
        )
    if _is_cached_elsewhere(root, outputs):
        return LeaveAlone(
            f"its {what} are cached, but not as a [batch, num_kv_heads, kv_len, head_dim] tensor that grows by cat"
            " and is returned as it is (another layout, or a stack?)",
            f"Return cat([past, new], dim=-2) itself, keys and values in tensors of their own. {LEAVE}.",
        )
    return LeaveAlone(f"its {what} are not returned as a KV cache", "")


def _written_values(graph: Graph) -> set[Node]:
    """The writes to inputs, and the nodes that go into them."""
    writes = (node for node in graph.nodes if node.target is _aten.copy_.default)
    return ancestors(source for node in writes for source in node.all_input_nodes[1:])


def _write_before(root: Node) -> Node | None:
    """What computes the new numbers of an input that keys or values are read from: of a cache of fixed length."""
    read, written = ancestors([root]), set(mutated_inputs(root.graph))
    for node in root.graph.nodes:
        if node.target is _aten.copy_.default and node.args[0] in written & read:
            source = node.args[1]
            return source if isinstance(source, Node) and source.op == "call_function" else node
    return None


def _is_cached_elsewhere(root: Node, outputs: set[Node]) -> bool:
    """Whether keys that are no output are returned in another form."""
    moved_from = {leaf for leaf in leaves_of([root]) if is_float(leaf, MOST_DIMS)}
    large = (out for out in outputs if len(shape_of(out) or ()) >= 4)
    return any(not moved_from.isdisjoint(leaves_of([out])) for out in large)

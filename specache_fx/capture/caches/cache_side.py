"""One side of an attention, its keys or its values, and what a model caches of it."""

from __future__ import annotations

from collections.abc import Collection
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
    real_users,
    same_sizes,
    shape_of,
    shown_shape,
    target_name,
)
from specache_fx.capture.graph.left_alone import GROW, GROWING, LEAVE, LeaveAlone
from specache_fx.capture.program import Side
from specache_fx.runtime.handles.handle_form import MOST_DIMS

ONLY_ATTENTION = f"Let nothing but attention, and cat([past, new], dim=-2), read the cached tensors. {LEAVE}."
_aten = torch.ops.aten
_SAME_TOKENS = {"clone", "_to_copy", "slice"}


def without_repeat(node: Node) -> Node:
    """What `reshape(clone(expand(unsqueeze(x, 2), ...)), ...)` repeats; another node itself.

    A reshape may insert the dimension, too: `x.view(b, h, 1, n, d)`.
    """
    chain: list[Any] = [node]
    for names in (("reshape",), ("clone",), ("expand",), ("unsqueeze", "reshape")):
        if target_name(chain[-1]) in names:
            chain.append(chain[-1].args[0])
    shapes = [shape_of(each) or () for each in chain]
    if len(chain) < 4 or (len(shapes[-1]), len(shapes[-3])) != (4, 5):
        return node
    expanded, inserted, root = shapes[-3:]
    (batch, heads, *rest), groups = root, expanded[2]
    is_repeat = (
        same_sizes(inserted, (batch, heads, 1, *rest))
        and same_sizes(expanded, (batch, heads, groups, *rest))
        and same_sizes(shapes[0], (batch, heads * groups, *rest))
    )
    return chain[-1] if is_repeat else node


def returned_of(root: Node, outputs: set[Node]) -> Node | None:
    """Keys or values of four dimensions as a model returns them, all or the newest; None where it returns neither."""
    if len(shape_of(root) or ()) != 4:
        return None
    kept = [user for user in root.users if user in outputs and newest(user) is not None]
    return root if root in outputs else kept[0] if len(kept) == 1 else None


def other_reader(node: Node, own: Collection[Node]) -> Node | None:
    """The first user that reads a node's numbers and is none of `own`."""
    return next((user for user in real_users(node) if user not in own), None)


def grows(node: Any) -> bool:
    """Whether a result is a cache with this call's tokens appended, `cat([past, new])`, or the newest part of one."""
    while isinstance(node, Node) and target_name(node) in _SAME_TOKENS and node.args:
        node = node.args[0]
    parts, _ = concatenated(node) or ([], 0)
    if len(parts) < 2 or len(shape_of(node) or ()) not in (3, 4):
        return False
    moved_from = leaves_of(parts[:1])
    return shape_of(parts[0]) == (0,) or any(
        node.op == "placeholder" and is_float(node) for node in moved_from
    )


def _appended(root: Node) -> tuple[Node | None, Node]:
    """The past, maybe changed, and the new part of `cat([past, new], -2)`; no past where there is none."""
    parts, dim = concatenated(root) or ([], 0)
    if len(parts) != 2 or dim != 2:
        return None, root
    past, new = parts
    if shape_of(past) == (0,) or (past.op == "placeholder" and shape_of(past)[2] == 0):  # type: ignore[index]
        return None, new
    is_past = any(node.op == "placeholder" and len(shape_of(node) or ()) == 4 for node in ancestors([past]))
    return (past, new) if is_past else (None, root)


def side_of(root: Node, what: str, outputs: set[Node], inside: set[Node]) -> Side:
    """Describe a cache.

    Args:
        root: Past and new, of which a part is returned.
        what: "keys" or "values", for messages.
        outputs: The graph's.
        inside: What may read it: the attentions over it, and what leads to them.

    Raises:
        LeaveAlone: If something else reads it, which handles would not serve; or if its past is changed.
    """
    past, new = _appended(root)
    output = returned_of(root, outputs)
    assert output is not None
    if past is not None and past.op != "placeholder":
        raise LeaveAlone(
            f"what is appended to is not the past as it came in, but what {described(past)} makes of it",
            f"Append this call's tokens to the past itself: cat([past, new], dim=-2). {LEAVE}.",
        )
    if (user := other_reader(root, {*inside, output, root.graph.output_node()})) is not None:
        if user in _written_values(root.graph):
            raise LeaveAlone(
                f"its {what} are written into a cache of fixed length: {described(user)}", GROWING
            )
        raise LeaveAlone(f"its {what} are also used by {described(user)}", ONLY_ATTENTION)
    if past is not None and (user := other_reader(past, {root})) is not None:
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

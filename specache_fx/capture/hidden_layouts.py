"""`insert_explicit_permutes`: permutes where a model reads a cache of another layout without one.

    keys = cat([permute(past), k], 2)                    # read so; output permute(keys), the layout of past
        -> out = cat([past, permute(k)], 0); keys = permute(out)
    keys = cat([past, k], 3); scores = bmm(q, keys)      # output; [batch, num_kv_heads, head_dim, kv_len]
        -> scores = bmm(q, transpose(transpose(keys, 2, 3), 2, 3))

The graph computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from specache_fx.capture.graph_edit import call
from specache_fx.capture.graph_slices import ancestors, eliminate_dead_code
from specache_fx.capture.graph_utils import concatenated, order_of, shape_of, swaps, target_name
from specache_fx.capture.normalize_attention import SDPA
from specache_fx.runtime.handle_form import ORDERS, Form, inverse, token_dim

_aten = torch.ops.aten
_FOLLOWING = ("sym_size", "sym_numel", "new_ones", "new_zeros", "new_full", "new_empty")
FORMS: dict[tuple[int, ...], Form] = {
    ORDERS[form]: form for form in (Form.TOKENS_FIRST, Form.SEQUENCE_FIRST, Form.TOKENS_LAST)
}


def insert_explicit_permutes(graph: Graph) -> dict[Node, Form]:
    """Insert permutes.

    Returns:
        Outputs that are read by one now, and their form.
    """
    returned = [out for out in graph.output_node().all_input_nodes if len(shape_of(out) or ()) == 4]
    shown = dict(filter(None, [_permute_reads(graph, out) for out in returned]))
    if shown:
        eliminate_dead_code(graph)
    products = _score_products(graph)
    others = [out for out in returned if out not in shown and out.op != "placeholder"]
    last = [out for out in others if _is_read_by_sdpa(out) or _transpose_twice(graph, out, products)]
    return shown | dict.fromkeys(last, Form.TOKENS_LAST)


def permuted(graph: Graph, node: Node, order: Sequence[int], origin: Node) -> Node:
    """Insert a permutation of four dimensions, in normal form."""
    moved = [dim for i, dim in enumerate(order) if i != dim]
    if len(moved) == 2:
        return call(graph, _aten.transpose.int, (node, *sorted(moved)), origin)
    return call(graph, _aten.permute.default, (node, list(order)), origin)


def follows_layout(user: Node) -> bool:
    """Whether a node reads a cache in a way that does not depend on the layout, or can follow it."""
    return user.op == "output" or target_name(user) in _FOLLOWING


def _permute_reads(graph: Graph, returned: Node) -> tuple[Node, Form] | None:
    """Have a cache that is permuted to be returned be permuted for its readers; what is returned then, and its form."""
    form = next((form for order, form in FORMS.items() if inverse(order) == order_of(returned)), None)
    keys: Any = returned.args[0] if form is not None else None
    if form is None or keys.op == "placeholder" or all(user is returned for user in keys.users):
        return None
    parts, dim = concatenated(keys) or ([], None)
    past: Any = parts[0] if dim == 2 else None
    if dim == 2 and (
        len(parts) != 2 or order_of(past) != list(ORDERS[form]) or past.args[0].op != "placeholder"
    ):
        return None
    with graph.inserting_after(keys):
        root = call(
            graph, returned.target, (keys if past is None else parts[1], *returned.args[1:]), returned
        )
    if past is not None:
        with graph.inserting_after(root):
            args = ([past.args[0], root], token_dim(form))
            root = call(graph, _aten.cat.default, args, returned)
    with graph.inserting_after(root):
        read = permuted(graph, root, ORDERS[form], returned)
    returned.replace_all_uses_with(root)
    keys.replace_all_uses_with(read, delete_user_cb=lambda user: user not in (root, returned))
    return root, form


def _is_read_by_sdpa(root: Node) -> bool:
    """Whether the readers of a cache are SDPAs of `transpose(root, 2, 3)`."""
    readers = [user for user in root.users if not follows_layout(user)]
    transposed = bool(readers) and all(swaps(reader, 2, 3) for reader in readers)
    return transposed and all(user.target is SDPA for reader in readers for user in reader.users)


def _score_products(graph: Graph) -> set[Node]:
    """The products that a softmax is computed from, without another product in between."""
    products = [node for node in graph.nodes if target_name(node) in ("mm", "addmm", "bmm")]
    softmaxes = [node for node in graph.nodes if node.target is _aten._softmax.default]
    return ancestors(softmaxes, products).intersection(products)


def _transpose_twice(graph: Graph, root: Node, products: set[Node]) -> bool:
    """Have keys `[batch, num_kv_heads, head_dim, kv_len]` that are multiplied as they are be transposed, and back."""
    work, readers = [root], list[Node]()
    while work:
        node = work.pop()
        for user in node.users:
            if target_name(user) in ("expand", "reshape", "clone"):
                work.append(user)
            elif user in products and user.args[-1] is node:
                readers.append(user)
            elif not follows_layout(user):
                return False
    if not readers:
        return False
    with graph.inserting_after(root):
        keys = call(graph, _aten.transpose.int, (root, 2, 3), root)
    with graph.inserting_after(keys):
        read = call(graph, _aten.transpose.int, (keys, 2, 3), root)
    root.replace_all_uses_with(
        read, delete_user_cb=lambda user: user is not keys and not follows_layout(user)
    )
    return True

"""`specialize_floats`: floats that are a module's own are constants.

    s = l_self_scaling.item(); scaled_dot_product_attention(q, k, v, scale=s)
        -> scaled_dot_product_attention(q, k, v, scale=0.25)

Dynamo traces one code for all models of a class, and makes a symbol of a float in which two of them differ (of every
float, with `dynamic=True`). A guard says here which it is, so that another one compiles anew. What a caller passes to
the model stays a symbol: it may be another number in each step.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_arg

from specache_fx.capture.graph_slices import float_of
from specache_fx.capture.graph_utils import value_of


def _is_own(node: Node) -> bool:
    """Whether a graph's input is an attribute of a module."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    where = getattr(source, "guard_source", None)
    return "NN_MODULE" in str(where() if callable(where) else where)  # a method before torch 2.12


def specialize_floats(gm: GraphModule) -> None:
    """Put numbers in the place of symbols, in a graph of Dynamo's."""
    for node in list(gm.graph.nodes):
        symbol, read = value_of(node), node.all_input_nodes
        if node.target != "item" or not isinstance(symbol, torch.SymFloat) or not all(map(_is_own, read)):
            continue
        if (number := float_of(symbol)) is None:
            continue

        def known(arg: Node, symbol: Node = node, number: float = number) -> Argument:
            return number if arg is symbol else arg

        for user in list(node.users):
            user.args, user.kwargs = map_arg(user.args, known), map_arg(user.kwargs, known)
        gm.graph.erase_node(node)

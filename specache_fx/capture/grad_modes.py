"""Modes of gradients that a model enters in its own `forward`: `@torch.inference_mode()`, `with torch.no_grad()`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import grad_mode
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.graph_utils import output_node, placeholders, value_of

# The exit of a mode reads its entry, and so is erased first.
_MODES = (grad_mode._exit_inference_mode, grad_mode._enter_inference_mode, torch._C._set_grad_enabled)


def needs_gradients(gm: GraphModule) -> bool:
    """Whether gradients flow through a graph of Dynamo's: it computes or writes a tensor that asks for them."""
    computed = (node for node in output_node(gm.graph).all_input_nodes if node.op != "placeholder")
    written = (value for value in _that_ask(placeholders(gm.graph)) if not value.is_leaf)
    return bool(_that_ask(computed)) or (torch.is_grad_enabled() and any(True for _ in written))


def without_modes(graph: Graph) -> None:
    """Take the modes out of a graph that is for inference, in place: it runs in one already."""
    for target in _MODES:
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)


def _that_ask(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """The values that ask for gradients."""
    return [
        value for value in map(value_of, nodes) if isinstance(value, torch.Tensor) and value.requires_grad
    ]

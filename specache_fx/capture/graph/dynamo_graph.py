"""Dynamo's graph before it is traced: what it asks for, and what a trace would show worse or not at all.

    scaled_dot_product_attention(q, k, v)          ->  specache.scaled_dot_product_attention(q, k, v, None, 0.0, ...)
    einsum("b h i d, b h j d -> b h i j", q, k)    ->  matmul(q, transpose(k, -1, -2))
    s = l_self_scaling.item(); f(s)                ->  f(0.25)
    keys[:, :, -s + 1:]                            ->  keys[:, :, -15:]
    dropout(x, 0.1, False)                         ->  x

Dynamo traces one code for all models of a class, and makes a symbol of a number in which two of them differ (of every
number, with `dynamic=True`). A guard says here which float or which window it is, so that another one compiles anew.
What a caller passes to the model stays a symbol: it may be another number in each step.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.source import TensorPropertySource
from torch.autograd import grad_mode
from torch.fx import GraphModule, Node

from specache_fx.capture.graph.graph_edit import copy_graph
from specache_fx.capture.graph.graph_slices import ancestors, float_of
from specache_fx.capture.graph.graph_utils import is_integer, placeholders, target_name, value_of
from specache_fx.runtime.ops import SDPA

# Modes of gradients that a model enters in its own `forward`. The exit of one reads its entry, and so is erased first.
_MODES = (grad_mode._exit_inference_mode, grad_mode._enter_inference_mode, torch._C._set_grad_enabled)
_DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
}  # fmt: skip


def needs_gradients(gm: GraphModule) -> bool:
    """Whether gradients flow through a graph of Dynamo's: it computes or writes a tensor that asks for them."""
    given = [value for value in map(value_of, placeholders(gm.graph)) if _asks(value)]
    results = (node for node in gm.graph.output_node().all_input_nodes if node.op != "placeholder")
    written = torch.is_grad_enabled() and any(not value.is_leaf for value in given)
    return written or any(map(_asks, map(value_of, results)))


def _asks(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def prepare(gm: GraphModule) -> GraphModule:
    """Edit a graph: SDPA as an operator of ours, no dropouts that are off, and a module's floats as numbers.

    Modes of gradients are left out: a graph that comes here needs none, and runs in one already.
    """
    for target in _MODES:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            gm.graph.erase_node(node)
    _specialize_floats(gm)
    _specialize_windows(gm)
    for name, child in gm.named_children():  # of operators that take graphs, as checkpoint's
        if isinstance(child, GraphModule):
            setattr(gm, name, prepare(copy_graph(child)))
    for node in list(gm.graph.nodes):
        if _is_off_dropout(node):  # gives its input back, which fake tensors don't show
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)
        elif node.op == "call_function" and target_name(node) == "einsum":
            node.target = _einsum
        elif node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            node.target = SDPA
    gm.recompile()
    return gm


def _is_off_dropout(node: Node) -> bool:
    def argument(place: int, name: str, default: Any) -> Any:
        return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)

    if node.op != "call_function" or target_name(node) not in _DROPOUTS:
        return False
    return bool(argument(1, "p", 0.5) == 0 or argument(2, "training", True) is False)


def _specialize_floats(gm: GraphModule) -> None:
    """Put numbers in the place of symbols that are floats of a module's own, or global ones (`math.pi`)."""
    for node in list(gm.graph.nodes):
        symbol, read = value_of(node), node.all_input_nodes
        if node.target != "item" or not isinstance(symbol, torch.SymFloat) or not all(map(_is_own, read)):
            continue
        if (number := float_of(symbol)) is not None:
            node.replace_all_uses_with(number)
            gm.graph.erase_node(node)


def _specialize_windows(gm: GraphModule) -> None:
    """Put numbers in the place of symbols that say how many of the newest keys are kept."""
    for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
        cut = node.args[1]
        if not isinstance(cut, tuple) or len(cut) != 4 or not isinstance(cut[2], slice):
            continue
        start = cut[2].start
        if isinstance(start, Node) and all(map(_is_int, ancestors([start]) & {*placeholders(gm.graph)})):
            kept = slice(int(value_of(start)), cut[2].stop, cut[2].step)
            node.args = (node.args[0], (*cut[:2], kept, cut[3]))


def _is_int(node: Node) -> bool:
    """Whether a graph's input is an int that the model keeps. A size of a tensor is another one in each step."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return is_integer(node) and source is not None and not isinstance(source, TensorPropertySource)


def _is_own(node: Node) -> bool:
    """Whether a graph's input is an attribute of a module, or a global."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    where = getattr(source, "guard_source", None)
    kind = str(where() if callable(where) else where)  # a method before torch 2.12
    return "NN_MODULE" in kind or kind.endswith(".GLOBAL")


def _einsum(equation: Any, *operands: Any) -> torch.Tensor:
    """`torch.einsum`; where it is a product of two tensors, one `matmul`.

        einsum("b h i d, b h j d -> b h i j", q, k)    ->  matmul(q, transpose(k, -1, -2))
        einsum("b i h d, b j h d -> b h i j", q, k)    ->  matmul(swap(q), transpose(swap(k), -1, -2))
        einsum("b h i j, b j h d -> b i h d", p, v)    ->  swap(matmul(p, swap(v)))
        einsum("b h i j, b j d -> b h i d", p, v)      ->  matmul(p, unsqueeze(v, 1))

    `swap` is a permutation. PyTorch would compute it by five permutations of five dimensions.
    """
    tensors = operands[0] if isinstance(operands[0], (list, tuple)) else operands
    found = re.fullmatch(r"(\w+),(\w+)->(\w+)", str(equation).replace(" ", ""))
    if found is None or any(len(set(letters)) < len(letters) for letters in found.groups()):
        return torch.einsum(equation, *operands)
    first, second, result = found.groups()
    summed = [letter for letter in first if letter in second and letter not in result]
    rows = [letter for letter in result if letter not in second]
    columns = [letter for letter in result if letter not in first]
    if len(summed) != 1 or not rows or not columns or set(first + second) - set(result) != {*summed}:
        return torch.einsum(equation, *operands)
    column = columns[-1]
    batches = {row: [letter for letter in result if letter not in (row, column)] for row in rows}
    # Of several rows the one that lets the first tensor stay as it is, if there is one.
    row = next((row for row in rows if [*batches[row], row, *summed] == list(first)), rows[-1])
    batch = batches[row]
    left = _arranged(tensors[0], first, [*batch, row, *summed])
    if second.index(column) < second.index(summed[0]):
        right = _arranged(tensors[1], second, [*batch, column, *summed]).transpose(-1, -2)
    else:
        right = _arranged(tensors[1], second, [*batch, *summed, column])
    return _arranged(left @ right, [*batch, row, column], result)


def _arranged(tensor: torch.Tensor, letters: Sequence[str], wanted: Sequence[str]) -> torch.Tensor:
    """A tensor with its dimensions in another order, and one of size 1 for each that it lacks."""
    order = [letters.index(letter) for letter in wanted if letter in letters]
    tensor = tensor if order == sorted(order) else tensor.permute(order)
    for place, letter in enumerate(wanted):
        tensor = tensor if letter in letters else tensor.unsqueeze(place)
    return tensor

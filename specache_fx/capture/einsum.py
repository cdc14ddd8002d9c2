"""Products that are written as `einsum`, as the products that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node


def as_matmul(node: Node) -> None:
    """Make a `matmul` of an `einsum` of two tensors in a graph of Dynamo's, where it is one; leave it alone else.

        einsum("b h i d, b h j d -> b h i j", q, k)    ->  matmul(q, transpose(k, -1, -2))
        einsum("b i h d, b j h d -> b h i j", q, k)    ->  matmul(swap(q), transpose(swap(k), -1, -2))
        einsum("b h i j, b j h d -> b i h d", p, v)    ->  swap(matmul(p, swap(v)))
        einsum("b h i j, b j d -> b h i d", p, v)      ->  matmul(p, unsqueeze(v, 1))

    `swap` is a permutation. PyTorch would compute it by five permutations of five dimensions.
    """
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return
    inputs, result = equation.replace(" ", "").split("->")
    sides = inputs.split(",")
    if len(sides) != 2 or any(len(set(each)) != len(each) for each in (*sides, result)):
        return
    first, second = sides
    summed = [letter for letter in first if letter in second and letter not in result]
    rows = [letter for letter in result if letter not in second]
    columns = [letter for letter in result if letter not in first]
    if len(summed) != 1 or not rows or not columns or set(first + second) - set(result) != {*summed}:
        return
    column = columns[-1]

    def others(row: str) -> list[str]:
        return [letter for letter in result if letter not in (row, column)]

    # Of several rows the one that lets the first tensor stay as it is, if there is one.
    row = next((row for row in rows if [*others(row), row, *summed] == list(first)), rows[-1])
    batch = others(row)
    graph, (left, right) = node.graph, operands
    with graph.inserting_before(node):

        def call(target: Any, *args: Any) -> Node:
            new = graph.call_function(target, args)
            new.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            return new

        def arranged(tensor: Any, letters: str, wanted: Sequence[str]) -> Any:
            """A tensor with its dimensions in another order, and one of size 1 for each that it lacks."""
            order = [letters.index(letter) for letter in wanted if letter in letters]
            if order != sorted(order):
                tensor = call(torch.permute, tensor, order)
            for place, letter in enumerate(wanted):
                tensor = tensor if letter in letters else call(torch.unsqueeze, tensor, place)
            return tensor

        left = arranged(left, first, [*batch, row, *summed])
        if second.index(column) < second.index(summed[0]):
            right = call(torch.transpose, arranged(right, second, [*batch, column, *summed]), -1, -2)
        else:
            right = arranged(right, second, [*batch, *summed, column])
        product = call(torch.matmul, left, right)
        out = arranged(product, "".join([*batch, row, column]), result)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    out._rename(node.name)

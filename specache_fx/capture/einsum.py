"""Products that are written as `einsum`, as the products that they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node


def as_matmul(node: Node) -> None:
    """Make a `matmul` of an `einsum` of two tensors in a graph of Dynamo's, where it is one; leave it alone else.

        einsum("b h i d, b h j d -> b h i j", q, k)    ->  matmul(q, transpose(k, -1, -2))
        einsum("b h i j, b j d -> b h i d", p, v)      ->  matmul(p, unsqueeze(v, 1))

    PyTorch would compute it by five permutations of five dimensions.
    """
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return
    inputs, result = equation.replace(" ", "").split("->")
    sides = inputs.split(",")
    if len(sides) != 2 or len(result) < 3 or any(len(set(each)) != len(each) for each in (*sides, result)):
        return
    first, second = sides
    batch, (row, column), summed = list(result[:-2]), tuple(result[-2:]), first[-1]
    transposed = second[-2:] == column + summed
    if first != "".join([*batch, row, summed]) or summed in result:
        return
    if not transposed and second[-2:] != summed + column:
        return
    shared = second[:-2]
    if [letter for letter in batch if letter in shared] != list(shared):
        return
    graph, (left, right) = node.graph, operands
    with graph.inserting_before(node):

        def call(target: Any, *args: Any) -> Node:
            new = graph.call_function(target, args)
            new.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            return new

        if transposed:
            right = call(torch.transpose, right, -1, -2)
        for place, letter in enumerate(batch):
            if letter not in shared:
                right = call(torch.unsqueeze, right, place)
    node.target, node.args, node.kwargs = torch.matmul, (left, right), {}

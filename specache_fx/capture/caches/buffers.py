"""The caller's duties towards buffers of fixed length: found in the graph, done in each call.

The rows that tokens are written into are computed from integer inputs. Counters are inputs that the graph moves itself.
Other positions, and what the model asserts of integers, are cut out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.caches.cache_records import Tokens, Written
from specache_fx.capture.graph.graph_edit import finish
from specache_fx.capture.graph.graph_slices import ancestors, cut_out
from specache_fx.capture.graph.graph_utils import placeholders, shape_of, value_of
from specache_fx.capture.graph.left_alone import GROW, LEAVE, LeaveAlone
from specache_fx.runtime.graph_part import Part

REMEDY = f"Let nothing but attention read such a cache. Or {GROW}. {LEAVE}."
_aten = torch.ops.aten
Size = int | tuple[int, int | None]
"""A number; or the input of Dynamo's that has it as a size, and in which dimension (None: the input is the number)."""


def size_in(size: Size, args: Sequence[Any]) -> int:
    """The value of a size in a call."""
    if isinstance(size, int):
        return size
    place, dim = size
    return int(args[place] if dim is None else args[place].shape[dim])


@dataclass(frozen=True)
class Buffer:
    """Keys or values of a layer, as the model keeps them.

    Attributes:
        place: Position among Dynamo's inputs; None where the graph makes the buffer, in a first call.
        input: Position among the graph's: the values of a pair have one behind Dynamo's.
        outputs: Positions among Dynamo's outputs where the buffer itself is returned.
        form: See `runtime/handle_form.py`.
        num_kv_heads: KV heads.
        capacity: Tokens that it has room for; see `Size`.
        window: Tokens that it has room for, where it keeps the newest; None where it keeps all.
        before: Tokens that it has to hold before the call.
    """

    place: int | None
    input: int | None
    outputs: tuple[int, ...]
    form: str
    num_kv_heads: int
    capacity: Size
    window: int | None
    before: Tokens


@dataclass(frozen=True)
class FixedCaches:
    """The caller's duties towards a graph's buffers.

    Attributes:
        buffers: Keys and values in turn, layer by layer.
        starts: Positions of inputs that say where the first of this call's tokens is written: 0-d counters.
        positions: Computes where else tokens are written (`[q_len]`, or a number: where the first one is), how many
            tokens an attention reads, and what the model asserts of that.
        ends: Of these results the numbers of tokens that are read: whether each has to be the number that is there, for
            no mask hides more.
        asserts: What to say where an assertion doesn't hold, the last of these results.
        counters: Positions of integer inputs that the model moves.
        counted: Computes their next values.
        masks: Positions of inputs that are masks over the whole buffer, and are to be cut to the tokens that are there.
        shown: Whether each mask shows rows behind the tokens that are there: from their number (int64 `[]`) first.
        q_len: How many tokens the call has.
        batch: Number of sequences; a buffer may have room for more.
    """

    buffers: tuple[Buffer, ...]
    starts: tuple[int, ...]
    positions: Part
    ends: tuple[bool, ...]
    asserts: tuple[str, ...]
    counters: tuple[int, ...]
    counted: Part
    masks: tuple[int, ...]
    shown: Part
    q_len: Size
    batch: Size


def counters_of(gm: GraphModule) -> tuple[tuple[int, ...], Part]:
    """Integer inputs that are written to, and what computes their next values from integer inputs."""
    place = _places(gm)
    moved: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        if node.target is _aten.copy_.default and _is_integer(node.args[0]) and _is_of_integers(node.args[1]):
            moved[node.args[0]] = node.args[1]
    return tuple(place[node] for node in moved), _cut_out(gm, list(moved.values()))


def asserts_of(gm: GraphModule) -> tuple[list[Node], tuple[str, ...]]:
    """The model's assertions on its integer inputs alone, taken out of the graph: conditions and messages."""
    conditions, messages = list[Node](), list[str]()
    for node in list(gm.graph.nodes):
        if node.target in (_aten._assert_async.default, _aten._assert_async.msg) and _is_of_integers(node):
            conditions.append(node.args[0])
            messages.append(str((*node.args, "an assertion of the model does not hold")[1]))
            gm.graph.erase_node(node)
    return conditions, tuple(messages)


def positions_of(
    gm: GraphModule, written: Sequence[Written], further: Sequence[Any]
) -> tuple[tuple[int, ...], Part]:
    """The rows of tokens: counters among the inputs, and a graph of other positions, then `further`."""
    place = _places(gm)
    starts, others = dict[int, None](), dict[Any, None]()
    for side in written:
        counter = _counter_of(side.position)
        if side.before in (Tokens.NONE, Tokens.FULL):
            continue
        if counter is not None:
            starts[place[counter]] = None
        else:
            others[side.position] = None
    return tuple(starts), _cut_out(gm, [*others, *further])


def _cut_out(gm: GraphModule, results: list[Any]) -> Part:
    """What computes results from integers among Dynamo's inputs."""
    part = cut_out(gm, [result for result in results if isinstance(result, Node)])
    output = part.graph.graph.output_node()
    for node in placeholders(part.graph.graph):
        if not _is_integer(node):
            raise LeaveAlone(
                f"where a token is written is computed from `{node.name}`, which has no integers",
                f"Compute it from positions or a counter. {LEAVE}.",
            )
    found = iter(output.args[0])
    output.args = (tuple(next(found) if isinstance(result, Node) else result for result in results),)
    finish(part.graph)
    return part


def _is_of_integers(node: Any) -> bool:
    return all(_is_integer(each) for each in ancestors([node]) if each.op == "placeholder")


def _places(gm: GraphModule) -> dict[Node, int]:
    return {node: place for place, node in enumerate(placeholders(gm.graph))}


def _is_integer(node: Any) -> bool:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _counter_of(position: Any) -> Node | None:
    """The 0-d input that is added to `arange(q_len)`; None for another position."""
    if not isinstance(position, Node) or position.target is not _aten.add.Tensor or position.kwargs:
        return None
    for one, other in (position.args[:2], position.args[1::-1]):
        if _is_range(one) and isinstance(other, Node) and other.op == "placeholder" and shape_of(other) == ():
            return other
    return None


def _is_range(node: Any) -> bool:
    """Whether a node is 0, 1, 2, ..."""
    if not isinstance(node, Node):
        return False
    if node.target in (_aten.arange.start, _aten.arange.start_step):
        return bool(node.args[0] == 0 and node.args[2:] in ((), (1,)))
    return node.target is _aten.arange.default

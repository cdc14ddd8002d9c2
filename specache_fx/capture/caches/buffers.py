"""The caller's duties towards buffers of fixed length: found in the graph, done in each call.

The rows that tokens are written into are computed from integer inputs. Counters are inputs that the graph moves itself.
Other positions, and what the model asserts of integers, are cut out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from specache_fx.capture.caches.cache_records import Tokens
from specache_fx.capture.graph.graph_edit import finish
from specache_fx.capture.graph.graph_slices import ancestors, cut_out
from specache_fx.capture.graph.graph_utils import is_integer, is_integer_tensor, placeholders
from specache_fx.capture.graph.left_alone import GROW, LEAVE, LeaveAlone
from specache_fx.runtime.graph.graph_part import Part
from specache_fx.runtime.ops import SDPA

REMEDY = f"Let nothing but attention read such a cache. Or {GROW}. {LEAVE}."
_aten = torch.ops.aten
DATA = (SDPA, _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.embedding.default)
"""A mask that is computed with one of these is none of positions and padding alone."""
_HIDES = -1e4  # or less, as many a model adds: rows of zeros that were never written have no larger scores


@dataclass(frozen=True)
class Buffer:
    """Keys or values of a layer, as the model keeps them.

    Attributes:
        place: Position among Dynamo's inputs; None where the graph makes the buffer, in a first call.
        input: Position among the graph's: the values of a pair have one behind Dynamo's.
        outputs: Positions among Dynamo's outputs where the buffer itself is returned.
        form: See `runtime/handles/handle_form.py`.
        num_kv_heads: KV heads.
        window: Tokens that it has room for, where it keeps the newest; None where it keeps all.
        before: Tokens that it has to hold before the call.
    """

    place: int | None
    input: int | None
    outputs: tuple[int, ...]
    form: str
    num_kv_heads: int
    window: int | None
    before: Tokens


@dataclass(frozen=True)
class FixedCaches:
    """The caller's duties towards a graph's buffers.

    Attributes:
        buffers: Keys and values in turn, layer by layer.
        numbers: Computes of a call, from Dynamo's integer inputs alone

            - how many tokens and sequences it has, and how many tokens each buffer has room for,
            - where tokens are written (`[q_len]`, or a number: where the first one is),
            - how many tokens attentions read,
            - what the model asserts of that,
            - and what the counters are after it.
        starts: Positions of the inputs that say where tokens are: they grow with the context.
        rows: The rows that tokens are written into, where these are constants of the graph.
        is_step: Calls have one token.
        ends: Whether the number of tokens that an attention reads has to be that of the tokens that are there, for no
            mask hides more.
        asserts: What to say where an assertion doesn't hold.
        counters: Positions of integer inputs that the model moves.
        masks: Positions of inputs that are masks over the whole buffer, and are to be cut to the tokens that are there.
        shown: Whether each mask shows rows behind the tokens that are there: from their number (int64 `[]`) first.
    """

    buffers: tuple[Buffer, ...]
    numbers: Part
    starts: tuple[int, ...]
    rows: frozenset[int]
    is_step: bool
    ends: tuple[bool, ...]
    asserts: tuple[str, ...]
    counters: tuple[int, ...]
    masks: tuple[int, ...]
    shown: Part


def counters_of(gm: GraphModule) -> dict[Node, Any]:
    """Integer inputs that are written to, and what their next values are, where it is computed from such inputs."""
    writes = [node for node in gm.graph.nodes if node.target is _aten.copy_.default]
    return {
        node.args[0]: node.args[1]
        for node in writes
        if _is_integer(node.args[0]) and _is_of_integers(node.args[1])
    }


def asserts_of(gm: GraphModule) -> tuple[list[Node], tuple[str, ...]]:
    """The model's assertions on its integer inputs alone, taken out of the graph: conditions and messages."""
    conditions, messages = list[Node](), list[str]()
    for node in list(gm.graph.nodes):
        if node.target in (_aten._assert_async.default, _aten._assert_async.msg) and _is_of_integers(node):
            conditions.append(node.args[0])
            messages.append(str((*node.args, "an assertion of the model does not hold")[1]))
            gm.graph.erase_node(node)
    return conditions, tuple(messages)


def of_integers(gm: GraphModule, results: Any) -> Part:
    """What computes results, nodes and constants in lists, from integers among Dynamo's inputs."""
    nodes = list[Node]()
    map_arg(results, nodes.append)
    part = cut_out(gm, nodes)
    for node in placeholders(part.graph.graph):
        if not _is_integer(node):
            raise LeaveAlone(
                f"where a token is written is computed from `{node.name}`, which has no integers",
                f"Compute it from positions or a counter. {LEAVE}.",
            )
    output = part.graph.graph.output_node()
    made = dict(zip(nodes, output.args[0], strict=True))
    output.args = (map_arg(results, made.__getitem__),)
    finish(part.graph)
    return part


def shows_behind(mask: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
    """Whether a mask shows a column from `kv_len` on."""
    columns = torch.arange(mask.shape[-1], device=mask.device)
    shows = mask if mask.dtype == torch.bool else mask > _HIDES
    return (shows & (columns >= kv_len)).any()


def _is_of_integers(node: Any) -> bool:
    return all(_is_integer(each) for each in ancestors([node]) if each.op == "placeholder")


def _is_integer(node: Any) -> bool:
    return is_integer(node) or is_integer_tensor(node)

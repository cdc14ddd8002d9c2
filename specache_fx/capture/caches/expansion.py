"""Keys and values that are computed from what is cached, token by token: multi-head latent attention (MLA).

    keys, values = expand(k_rot, latent)     # cached: [batch, 1, kv_len, rope_dim], [batch, 1, kv_len, kv_lora_rank]

The cache keeps what the model caches. The operations in between are cut out of the graph, made to take any number of
tokens, and proved on random numbers to treat every token the same way and by itself. In decode the kernel runs them on
what the cache holds and on the lanes' own tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate

from specache_fx.capture.attention.random_numbers import Numbers, exact_products
from specache_fx.capture.caches.reading import Reading
from specache_fx.capture.graph.graph_edit import finish
from specache_fx.capture.graph.graph_slices import ancestors, extract, mutated_inputs
from specache_fx.capture.graph.graph_utils import (
    is_static_input,
    placeholders,
    shape_of,
    source_of,
    symbols_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.left_alone import LEAVE, LeaveAlone
from specache_fx.errors import first_line
from specache_fx.runtime.graph.expansion import Expansion

_LAYOUTS = {"reshape", "expand", "new_empty", "new_zeros", "new_ones", "empty", "zeros"}
_PROOF_TOKENS = (6, 3)
_PROOF_SIZES = (1.0, 30.0)  # of the numbers that are cached
_LINES = 4  # of the model are named, where a cache can't be followed
_REMEDY = f"Do that before the append, and cache what attention reads. {LEAVE}."


def find_expansion(gm: GraphModule, reading: Reading) -> Expansion:
    """Cut out what lies between the cache and an attention, and prove what is asked of it.

    Raises:
        LeaveAlone: If it is not a function of each token's cached numbers alone.
    """
    results, caches = [reading.core.key, reading.core.value], [reading.key_cache, reading.value_cache]
    # Dynamo may have a symbol of its own for the length of each.
    sizes = [(shape_of(cache) or ())[2] for cache in caches]
    lengths = [
        node
        for node in ancestors(results, caches)
        if isinstance(value_of(node), torch.SymInt)
        and any(statically_known_true(value_of(node) == size) for size in sizes)
    ]
    needed = ancestors(results, [*caches, *lengths])
    leaves = [node for node in placeholders(gm.graph) if node in needed and node not in (*caches, *lengths)]
    written = set(mutated_inputs(gm.graph)) if leaves else set()
    for leaf in leaves:
        if (
            leaf in written
            or symbols_of(value_of(leaf)) & set().union(*map(symbols_of, sizes))
            or (isinstance(value_of(leaf), torch.Tensor) and not is_static_input(leaf))
        ):
            raise LeaveAlone(f"{_made(reading)} and from `{leaf.name}`", _REMEDY)
    position = {node: i for i, node in enumerate(placeholders(gm.graph))}
    inputs = tuple(position[leaf] for leaf in leaves)
    # A graph that Dynamo made for one length has it in its views: taken for any length's first, then as it is.
    tokens = sizes[0]
    takes_any = [True] if isinstance(tokens, torch.SymInt) else [True, False]
    for any_length in takes_any:
        graph = _cut(gm, reading, lengths, leaves, tokens if any_length else None)
        expansion = Expansion(graph, inputs, None if any_length else tokens)
        problem = _differs(reading, expansion, leaves)
        if problem is None:
            return expansion
    raise LeaveAlone(f"{_made(reading)}, and {problem}", _REMEDY)


def _made(reading: Reading) -> str:
    """The sources of keys and values, with the model's lines."""
    between = reading.inside - reading.core.inner
    order = (node for node in reading.core.node.graph.nodes if node in between)
    lines = [line for line in dict.fromkeys(map(source_of, order)) if line]
    shown = "; ".join(lines[:_LINES]) + ("; ..." if len(lines) > _LINES else "")
    where = f" ({shown})" if lines else ""
    return f"its keys and values are computed in each step from what is cached{where}"


def _cut(
    gm: GraphModule, reading: Reading, lengths: list[Node], leaves: list[Node], tokens: Any
) -> GraphModule:
    """The operations between cache and attention. The length is an input: nodes `lengths`, the constant `tokens`."""
    inputs = [reading.key_cache, reading.value_cache, *lengths, *leaves]
    cut = extract(gm, [reading.core.key, reading.core.value], inputs)
    ends = placeholders(cut.graph)
    with cut.graph.inserting_after(ends[1]):
        num_tokens = cut.graph.placeholder("num_tokens")
    for length in ends[2 : 2 + len(lengths)]:
        length.replace_all_uses_with(num_tokens)
        cut.graph.erase_node(length)

    for node in list(cut.graph.nodes):
        if target_name(node) not in _LAYOUTS or not isinstance(tokens, int):
            continue

        def as_input(value: Any, node: Node = node) -> Any:
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                return value
            if value == tokens:
                return num_tokens
            if any(size == tokens for size in shape_of(node) or ()) or value % tokens:
                return value
            with cut.graph.inserting_before(node):  # batch rows and tokens in one dimension
                return cut.graph.call_function(operator.mul, (num_tokens, value // tokens))

        node.args = map_aggregate(node.args, as_input)
        node.kwargs = map_aggregate(node.kwargs, as_input)
    return finish(cut)


def _differs(reading: Reading, expansion: Expansion, leaves: list[Node]) -> str | None:
    """Whether every token is treated the same way and by itself, whatever the others are: on random numbers.

    A token's numbers stay while all others, of its batch row and of the other rows, become a thousand times larger or
    smaller; the tokens are moved; some are left out. What a token becomes has to stay the same but for rounding.

    Returns:
        The difference; None where all holds.
    """
    numbers = Numbers(reading.core.node)
    more = [numbers.value(leaf, 1.0) for leaf in leaves]
    tokens = _PROOF_TOKENS[0] if expansion.chunk is None else expansion.chunk
    caches = (reading.key_cache, reading.value_cache)

    def sized(node: Node, tokens: int) -> tuple[int, ...]:
        batch, heads, _, dim = (numbers.integer(size) for size in shape_of(node) or ())
        return batch, heads, tokens, dim

    def random(scale: float) -> list[torch.Tensor]:
        like = [value_of(cache) for cache in caches]
        sizes = [sized(cache, tokens) for cache in caches]
        made = (torch.randn(size, generator=numbers.generator, device="cpu") * scale for size in sizes)
        return [side.to(device=x.device, dtype=x.dtype) for side, x in zip(made, like, strict=True)]

    def run(sides: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        count = sides[0].shape[2]
        with torch.no_grad(), exact_products():
            found = tuple(expansion.graph.forward(*(side.clone() for side in sides), count, *more))
        if any(out.shape != sized(node, count) for out, node in zip(found, results, strict=True)):
            raise ValueError("they have other shapes for another number of tokens")
        return found

    results = (reading.core.key, reading.core.value)
    try:
        for size in _PROOF_SIZES:
            sides = random(size)
            plain = run(sides)
            moved = [out.roll((-1, -1), (0, 2)) for out in run([side.roll((1, 1), (0, 2)) for side in sides])]
            if not _is_same(plain, moved):
                return "what becomes of a token depends on its place"
            fewer = _PROOF_TOKENS[1]
            if expansion.chunk is None and not _is_same(
                [out[:, :, :fewer] for out in plain], run([side[:, :, :fewer] for side in sides])
            ):
                return "what becomes of a token depends on how many there are"
            for row, token in ((0, 0), (-1, tokens // 2), (-1, -1)):
                for scale in (1e3 * size, 1e-3 * size):
                    others = random(scale)
                    for other, side in zip(others, sides, strict=True):
                        other[row, :, token] = side[row, :, token]
                    pairs = ([out[row, :, token] for out in each] for each in (plain, run(others)))
                    if not _is_same(*pairs):
                        return "what becomes of a token depends on other tokens"
    except ValueError as error:
        return str(error)
    except (RuntimeError, TypeError, IndexError) as error:
        return f"they can't be computed for another number of tokens ({first_line(error)})"
    return None


def _is_same(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Whether numbers are the same but for rounding."""
    for x, y in zip(expected, found, strict=True):
        if not bool(((x - y).abs() <= 8 * torch.finfo(x.dtype).eps * x.abs().max()).all()):
            return False
    return True

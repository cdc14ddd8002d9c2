"""Which inputs of a decode graph are the token, the positions, the lengths and the masks: by dependence, not by name.

A decode graph says where it is in the sequence in several ways: position ids, the length of the past, masks that
grow by one. `Sources` names these inputs; `Sources.ahead` makes what they would be some tokens later. What is computed
from them alone (the *prelude*: cos and sin, position embeddings) can so be evaluated for the output token and for
the speculative token that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.errors import UnsupportedGraphError
from specache_fx.passes.base import AttentionSite, PassState
from specache_fx.passes.graph_utils import (
    ancestors,
    extract,
    is_integer,
    is_static_input,
    output_node,
    placeholders,
    reads_shape_only,
    shape_of,
    symbols_of,
    target_name,
    value_of,
)

_LAYOUT = {"view", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "to", "long", "int", "clone"}


@dataclass
class Sources:
    """Positions among Dynamo's inputs.

    Attributes:
        token: The token ids, int `[batch, 1]`; None where the graph takes none.
        vocabulary: Rows of the token's embedding table.
        lengths: Integers that grow by one per token.
        positions: Integer tensors that grow by one per token.
        masks: Masks over keys, whose last dimension grows by one per token.
        shapes: Past KV tensors; where only their shape is read, that is a length too.
        most: The most tokens that such a tensor, or the integer that is its length, gets to have, where its layer keeps
            a window.
        mask_graph: Computes the attentions' masks; None where they have none.
        mask_inputs: Positions of its inputs.
        knows_next: The next token's position can be told. Not where Dynamo made the length a constant of the graph
            (it compiles such a graph once, for the first decode step of some models) and no position is passed in.
    """

    token: int | None = None
    vocabulary: int | None = None
    lengths: set[int] = field(default_factory=set)
    positions: set[int] = field(default_factory=set)
    masks: set[int] = field(default_factory=set)
    shapes: set[int] = field(default_factory=set)
    most: dict[int, int] = field(default_factory=dict)
    mask_graph: GraphModule | None = None
    mask_inputs: list[int] = field(default_factory=list)
    knows_next: bool = True

    def ahead(self, args: Sequence[Any], inputs: Sequence[int], num_tokens: int) -> list[Any]:
        """The inputs as they would be `num_tokens` later.

        Args:
            args: Dynamo's inputs.
            inputs: Which of them are wanted.
            num_tokens: How far ahead; 0 gives them as they are.
        """
        if not num_tokens:
            return [args[i] for i in inputs]
        moved: list[Any] = []
        for i in inputs:
            value = args[i]
            if i in self.lengths or i in self.positions:
                value = min(value + num_tokens, self.most[i]) if i in self.most else value + num_tokens
            elif i in self.masks:
                value = torch.cat([value, value.new_ones((*value.shape[:-1], num_tokens))], dim=-1)
            elif i in self.shapes:
                batch, heads, kv_len, dim = value.shape
                kv_len = min(kv_len + num_tokens, self.most.get(i, kv_len + num_tokens))
                value = value.new_empty(1).expand(batch, heads, kv_len, dim)
            moved.append(value)
        return moved

    def masks_at(self, args: Sequence[Any], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """The masks that the model would apply `num_tokens` later, `[batch or 1, 1, 1, kv_len]` each."""
        if self.mask_graph is None:
            return ()
        return self.mask_graph(*self.ahead(args, self.mask_inputs, num_tokens))


@dataclass(frozen=True)
class Prelude:
    """The part of a decode graph that depends on positions and lengths alone.

    Attributes:
        graph: Computes the boundary tensors.
        graph_ahead: The same, with embedding indices held inside their tables: the token after the last one that a
            model can take has no position, and only the speculative lane would ask for it.
        inputs: Positions of its inputs among Dynamo's.
        sources: How they move.
    """

    graph: GraphModule
    graph_ahead: GraphModule
    inputs: tuple[int, ...]
    sources: Sources

    def __call__(self, args: Sequence[Any], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """The boundary tensors for the token `num_tokens` after the current one."""
        graph = self.graph_ahead if num_tokens else self.graph
        return graph(*self.sources.ahead(args, self.inputs, num_tokens))

    def following(
        self, args: Sequence[Any], num_tokens: int, current: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """As a call, but `current` where the model has no such position (the end of a table of rotations)."""
        if not num_tokens:
            return current
        try:
            ahead = self(args, num_tokens)
        except IndexError:
            return current
        fits = all(new.shape == old.shape for new, old in zip(ahead, current, strict=True))
        return ahead if fits else current


def _is_integer_tensor(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32, torch.bool)


def _is_mask(node: Node, shape: tuple[Any, ...], past_len: Any) -> bool:
    """Whether an input looks like a mask over keys: integers or booleans, or floats of the cache's length."""
    if len(shape) < 2:
        return False
    if _is_integer_tensor(node):
        return isinstance(shape[-1], torch.SymInt) or shape[-1] > 1
    grows = isinstance(shape[-1], torch.SymInt) or statically_known_true(shape[-1] == past_len + 1)
    return bool(len(shape) == 2 and value_of(node).is_floating_point() and grows)


def _find_token(gm: GraphModule) -> tuple[Node | None, int | None]:
    """The integer input that indexes an embedding whose table has a row per logit, and the table's rows."""
    shapes = [shape_of(out) for out in output_node(gm.graph).all_input_nodes]
    last_dims = {shape[-1] for shape in shapes if shape and isinstance(shape[-1], int)}
    found: list[tuple[bool, Node, int]] = []
    for start in placeholders(gm.graph):
        if not _is_integer_tensor(start) or is_static_input(start):
            continue
        work, seen = [start], set()
        while work:
            node = work.pop()
            if node in seen:
                continue
            seen.add(node)
            for user in node.users:
                if target_name(user) == "embedding" and user.args[0] is node:
                    table = shape_of(user.args[1])
                    assert table is not None
                    found.append((table[0] in last_dims, start, int(table[0])))
                elif target_name(user) in _LAYOUT:
                    work.append(user)
    if not found:
        return None, None
    _, node, rows = max(found, key=lambda entry: entry[0])
    return node, rows


def find_sources(gm: GraphModule, state: PassState) -> Sources:
    """Name the inputs of a decode graph before the cache is taken out of it.

    Raises:
        UnsupportedGraphError: If a mask is computed from something that can't be followed.
    """
    inputs = placeholders(gm.graph)
    index = {node: i for i, node in enumerate(inputs)}
    past = {inputs[i] for i in state.past_inputs}
    token, vocabulary = _find_token(gm)
    sources = Sources(index[token] if token is not None else None, vocabulary)
    token_shape = shape_of(token) if token is not None else None

    for site in state.owners:
        if site.window is not None and site.past_key is not None and site.past_value is not None:
            sources.most |= {index[side]: site.window - 1 for side in (site.past_key, site.past_value)}
    growing = [i for i in state.past_inputs if i not in sources.most] or state.past_inputs
    past_len = shape_of(inputs[growing[0]])[2]  # type: ignore[index]
    sizes_of_others: set[Any] = set()
    for node in inputs:
        shape = shape_of(node)
        if shape is None or is_static_input(node):
            continue
        if node in past or (
            len(shape) == 4
            and value_of(node).is_floating_point()
            and statically_known_true(shape[2] == past_len)
        ):
            sources.shapes.add(index[node])
            continue
        if node is not token and _is_mask(node, shape, past_len):
            sources.masks.add(index[node])
            continue
        for size in shape:
            sizes_of_others |= symbols_of(size)
        same_shape = token_shape is not None and (shape == token_shape or shape[-2:] == token_shape)
        if node is not token and _is_integer_tensor(node) and len(shape) and (same_shape or shape == (1,)):
            sources.positions.add(index[node])
    whole = set().union(*(symbols_of(shape_of(inputs[i])[2]) for i in growing if i not in sources.most))  # type: ignore[index]
    windows = list(sources.most)
    for node in inputs:
        # An integer that is also the size of a tensor that does not grow (the batch) is no length.
        symbols = symbols_of(value_of(node)) if is_integer(node) else set()
        if symbols and not symbols & sizes_of_others:
            sources.lengths.add(index[node])
            # The length of a window's past comes in as an integer too. One that is also a whole cache's isn't full yet.
            for i in windows:
                if symbols == symbols_of(shape_of(inputs[i])[2]) and not symbols & whole:  # type: ignore[index]
                    sources.most[index[node]] = sources.most[i]

    static = all(isinstance(shape_of(node)[2], int) for node in past) and not sources.lengths  # type: ignore[index]
    sources.knows_next = bool(sources.positions) or not static
    checked = [site for site in state.sites if site.window is None and site.mask is not None]
    masks = list(dict.fromkeys(site.mask for site in checked if site.mask is not None))
    if masks:
        roots = mask_inputs(gm, masks, sources, checked[0])
        sources.mask_graph = extract(gm, masks, roots)
        sources.mask_inputs = [index[node] for node in roots]
    return sources


def mask_inputs(gm: GraphModule, masks: list[Node], sources: Sources, site: AttentionSite) -> list[Node]:
    """The inputs that masks are computed from.

    Args:
        gm: The graph.
        masks: The masks.
        sources: What is known of its inputs.
        site: An attention that uses one of them, for the error.

    Raises:
        UnsupportedGraphError: If one of them can't be followed.
    """
    inputs = placeholders(gm.graph)
    index = {node: i for i, node in enumerate(inputs)}
    needed = ancestors(masks)
    roots = [node for node in inputs if node in needed]
    for node in roots:
        known = is_integer(node) or is_static_input(node) or index[node] in sources.masks | sources.positions
        shape_only = index[node] in sources.shapes and all(
            reads_shape_only(user) for user in node.users if user in needed
        )
        if not known and not shape_only:
            raise UnsupportedGraphError(
                f"The mask of attention `{site.node.name}` ({site.source}) is computed from input `{node.name}`,"
                " which is neither a length, a position nor a mask over keys. Pass a key padding mask of integers"
                ' or booleans, [batch, kv_len], or compile this model with backend="inductor".'
            )
    return roots

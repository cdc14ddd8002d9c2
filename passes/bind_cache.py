"""`bind_cache`: the KV cache leaves the graph.

Past and present KV become handles. What moves the pairs depends on the phase:

    prefill   out = sdpa(q, k, v, mask)                 ->  out = sdpa(q, k, v, mask)
              return keys, values, logits                   specache.store(k, v, select(mask, -2, -1), state, layer)
                                                            return logits

    extend    keys = cat([past_keys, k], -2)            ->  keys, values = specache.load(past_keys, past_values, k, v,
              values = cat([past_values, v], -2)                                         state, layer)
              out = sdpa(q, keys, values, mask)             out = sdpa(q, keys, values, mask)
              return keys, values, logits                   specache.store(k, v, mask[..., -1, :], state, layer)
                                                            return logits

    decode    out = sdpa(q, cat([past_keys, k], -2), ..) ->  out = specache.attention(q, k, v, layer, scale,
                                                                                  softcap, sinks)
              return keys, values, logits                   return logits

Storing right after each attention is what keeps one layer's 16-bit pairs alive at a time. In decode nothing reads
the masks any more, so they and all that knew `kv_len` die here; what they say besides padding is applied at run time by
`specache_fx/step_masks.py`, and for windows by `window_masks.py`.

Where keys and values are computed from what is cached (MLA), the marker gets what is cached of the new token, the
attention's index (of its expansion) and the width of its output.

Attentions that share a cache: the first one's pairs are stored and loaded, and in decode each gets a marker with its
own query and the first one's layer and new pair.

Expects sites from `match_attention`; without any it leaves the graph as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.passes.base import AttentionSite, LeaveAlone, OutputPlan, Pass, PassState, Phase, leave_alone
from specache_fx.passes.cache_side import grows
from specache_fx.passes.find_sources import find_sources, find_token
from specache_fx.passes.graph_edit import add_placeholder, call, finish
from specache_fx.passes.graph_slices import (
    ancestors,
    draws_random_numbers,
    eliminate_dead_code,
    extract,
    has_effect,
    mutated_inputs,
)
from specache_fx.passes.graph_utils import (
    is_integer,
    is_static_input,
    output_node,
    placeholders,
    shape_of,
    value_of,
)
from specache_fx.passes.window_masks import find_window_masks
from specache_fx.runtime import ops  # noqa: F401  (registers torch.ops.specache)
from specache_fx.runtime.step_table import empty_state

STATE = "specache_state"
_aten = torch.ops.aten
_NEVER_PREDICTED = 32  # rows of a table of embeddings, at most, that logits have no number for


def _plan_outputs(graph: Graph, state: PassState) -> OutputPlan:
    """Take handles, constants and (in decode) integers out of the graph's outputs."""
    output = output_node(graph)
    outs = list(output.args[0])  # type: ignore[arg-type]
    slots = {}
    for site in state.owners:
        slots[site.key_output], slots[site.value_output] = 2 * site.layer, 2 * site.layer + 1
    plan = OutputPlan(total=len(outs))
    for i, out in enumerate(outs):
        if not isinstance(out, Node):
            plan.constants[i] = out
        elif out in slots:
            plan.handles[i] = slots[out]
        elif state.phase is Phase.DECODE and (is_integer(out) or _tells_length(out, state)):
            plan.lengths.append(i)
        else:
            plan.kept.append(i)
    output.args = (tuple(outs[i] for i in plan.kept),)
    return plan


def _tells_length(out: Node, state: PassState) -> bool:
    """Whether an output that grows with the context is computed from lengths, positions and masks alone."""
    if not any(isinstance(size, torch.SymInt) for size in shape_of(out) or ()) or state.sources is None:
        return False
    moving = state.sources.lengths | state.sources.positions | state.sources.masks | state.sources.shapes
    needed = ancestors([out])
    return all(
        i in moving or is_static_input(node) or is_integer(node)
        for i, node in enumerate(placeholders(out.graph))
        if node in needed
    )


def _find_logits(graph: Graph, vocabulary: int | None) -> int | None:
    """Which of the outputs has a number for every token of the vocabulary; the last one computed, if several.

    A table of embeddings may have some rows more, for tokens that are put in but never predicted (pictures). What is
    taken here decides what lane 1 speculates on, and no output.
    """
    if vocabulary is None:
        return None
    order = {node: i for i, node in enumerate(graph.nodes)}
    outs = enumerate(output_node(graph).args[0])  # type: ignore[arg-type]
    found = [
        (shape[-1] == vocabulary, order[out], i)
        for i, out in outs
        if isinstance(out, Node)
        and (shape := shape_of(out))
        and len(shape) in (2, 3)
        and isinstance(shape[-1], int)
        and vocabulary - min(_NEVER_PREDICTED, vocabulary // 10) <= shape[-1] <= vocabulary
        and value_of(out).is_floating_point()
    ]
    return max(found)[2] if found else None


def _mask_row(graph: Graph, site: AttentionSite) -> Node | None:
    """The mask of the newest query: which keys are real. Inserted at the graph's insertion point."""
    if site.mask is None or len(shape_of(site.mask) or ()) < 2:
        return site.mask
    return call(graph, _aten.select.int, (site.mask, -2, -1), site.node)


def _bind_prefill(graph: Graph, site: AttentionSite, state_node: Node) -> None:
    if site.key_root is not site.new_key:
        site.key_root.replace_all_uses_with(site.new_key)  # a cat with nothing: a copy that nobody needs
        site.value_root.replace_all_uses_with(site.new_value)
    _store(graph, site, state_node)


def _store(graph: Graph, site: AttentionSite, state_node: Node) -> None:
    following = site.node.next
    with graph.inserting_before(following):
        row = _mask_row(graph, site) if site.window is None else None
        args = (site.new_key, site.new_value, row, state_node, site.layer)
        call(graph, torch.ops.specache.store.default, args, site.node)


def _bind_extend(graph: Graph, site: AttentionSite, state_node: Node) -> None:
    assert site.past_key is not None and site.past_value is not None
    order = {node: i for i, node in enumerate(graph.nodes)}
    roots, new = (site.key_root, site.value_root), (site.new_key, site.new_value)
    first, last = (choose(roots, key=order.__getitem__) for choose in (min, max))
    # A model may read keys before it has values: it appends these by itself.
    whole = all(order[user] > order[last] for root in roots for user in root.users)
    with graph.inserting_before(last if whole else first):
        args = (site.past_key, site.past_value, *(new if whole else (None, None)), state_node, site.layer)
        pair = call(graph, torch.ops.specache.load.default, args, site.node)
        sides = [call(graph, operator.getitem, (pair, i), site.node) for i in (0, 1)]
    for root, past, side in zip(roots, (site.past_key, site.past_value), sides, strict=True):
        if whole:
            root.replace_all_uses_with(side)
        else:
            root.replace_input_with(past, side)
    _store(graph, site, state_node)


def _bind_decode(graph: Graph, site: AttentionSite, index: int) -> None:
    more: tuple[Any, ...] = () if site.softcap is None and site.sinks is None else (site.softcap, site.sinks)
    if site.expansion is not None:
        more = (site.softcap, site.sinks, index, value_of(site.node).shape[-1])
    with graph.inserting_before(site.node):
        args = (site.query, site.new_key, site.new_value, site.layer, site.scale, *more)
        out = call(graph, torch.ops.specache.attention.default, args, site.node)
        if len(shape_of(site.node) or ()) == 3:  # batch and heads in one dimension
            out = call(graph, _aten.flatten.using_ints, (out, 0, 1), site.node)
        if (dtype := value_of(site.node).dtype) != value_of(out).dtype:
            out = call(graph, _aten._to_copy.default, (out,), site.node, kwargs={"dtype": dtype})
    site.node.replace_all_uses_with(out)
    graph.erase_node(site.node)


def _carried_state(inputs: list[Node], kept: list[Node], state: PassState) -> str | None:
    """An input that comes out again as another number: the state of a recurrent layer."""
    past = {inputs[i] for i in state.past_inputs}
    for node in inputs:
        value = value_of(node)
        if node in past or is_static_input(node) or not isinstance(value, torch.Tensor):
            continue
        if value.is_floating_point() and value.dim() > 1:
            moved = [out for out in kept if shape_of(out) == shape_of(node) and out is not node]
            if any(node in ancestors([out]) for out in moved):
                return node.name
    return None


def bind_cache(gm: GraphModule, state: PassState) -> GraphModule:
    """Replace the KV cache by handles and ops. Sets `state.outputs`, `past_inputs`, `token` and `sources`."""
    if not state.sites or state.outputs is not None:
        return gm
    graph = gm.graph
    inputs = placeholders(graph)
    position = {node: i for i, node in enumerate(inputs)}
    state.past_inputs = [
        position[past]
        for site in state.owners
        for past in (site.past_key, site.past_value)
        if past is not None
    ]
    token, _ = find_token(graph)
    state.token = None if token is None else position[token]
    if state.phase is Phase.DECODE:
        try:
            state.sources = find_sources(gm, state)
            state.window_masks = find_window_masks(gm, state, state.sources)
        except LeaveAlone as error:
            leave_alone(state, error.reason, error.remedy)
            return gm
    original = list(output_node(graph).args[0])  # type: ignore[arg-type]
    plan = state.outputs = _plan_outputs(graph, state)
    if state.sources is not None:
        effects = (node for node in graph.nodes if node.op == "call_function" and has_effect(node))
        changed = [*mutated_inputs(graph), *(node for node in effects if not draws_random_numbers(node))]
        state.mutated = next((node.name for node in changed), None)
        state.random = next((node.name for node in graph.nodes if draws_random_numbers(node)), None)
        state.logits = _find_logits(graph, state.sources.vocabulary)
        kept = [original[i] for i in plan.kept]
        state.kept_cache = next((node.name for node in kept if grows(node)), None)
        state.carried = _carried_state(inputs, kept, state)
    if plan.lengths:
        results = [original[i] for i in plan.lengths]
        used = ancestors(results)
        needed = [node for node in inputs if node in used]
        plan.length_graph = extract(gm, results, needed)
        plan.length_inputs = [position[node] for node in needed]

    if state.phase is Phase.DECODE:
        for i, site in enumerate(state.sites):
            _bind_decode(graph, site, i)
        eliminate_dead_code(graph)
        for node in placeholders(graph):
            node.meta["specache_input"] = position[node]
    else:
        state_node = add_placeholder(graph, STATE, empty_state(len(state.owners)))
        for site in state.owners:
            if state.phase is Phase.PREFILL:
                _bind_prefill(graph, site, state_node)
            else:
                _bind_extend(graph, site, state_node)
        eliminate_dead_code(graph)
    assert all(value_of(node) is not None for node in placeholders(graph))
    return finish(gm)


BIND_CACHE = Pass("bind_cache", bind_cache)

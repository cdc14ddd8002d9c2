"""`prompt_masks`: attention of several tokens follows a rule instead of a `[q_len, kv_len]` mask where both agree.

    out = sdpa(q, k, v, mask)       ->  verdict, real = test(mask, window)
                                        out = specache.prompt_attention(q, k, v, verdict, real, state, number, scale)

That is a prompt, a piece of one or the next turn. A model that is given an `attention_mask` computes such a mask, 4 GB
at 65,536 tokens, even where nothing is padding: only the numbers tell. The compiler fuses the test with what computes
the mask, and nothing of it is kept. The operator reads the verdict (`runtime/prompt_masks.py`). `store` goes on reading
the mask's last row. Keys and values are those of the kv heads: no copy for each query head is made.

Runs after `bind_cache`. Attentions that are spelt out, and masks that weights or random numbers go into, stay.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.passes.base import AttentionSite, Pass, PassState, Phase
from specache_fx.passes.bind_cache import STATE
from specache_fx.passes.cache_side import without_repeat
from specache_fx.passes.graph_edit import call, finish
from specache_fx.passes.graph_slices import (
    ancestors,
    draws_random_numbers,
    eliminate_dead_code,
    extract,
    mutated_inputs,
)
from specache_fx.passes.graph_utils import is_static_input, placeholders, shape_of, value_of
from specache_fx.passes.normalize_attention import SDPA
from specache_fx.runtime.prompt_masks import PromptMask, test


def prompt_masks(gm: GraphModule, state: PassState) -> GraphModule:
    """Test the masks of attentions. Sets `state.prompt_masks`."""
    if state.phase is Phase.DECODE or state.prompt_masks or not state.sites:
        return gm
    inputs = placeholders(gm.graph)
    assert inputs[-1].name == STATE
    tested: dict[tuple[Node, int | None], tuple[Node, Node, int]] = {}
    for site in state.sites:
        mask = site.mask
        if mask is None or not _may_follow_rule(site, mask):
            continue
        known = tested.get((mask, site.window))
        if known is None:
            roots = _inputs_of(gm, mask)
            if roots is None:
                continue
            graph = extract(gm, [mask], roots)
            with gm.graph.inserting_before(site.node):
                told = call(gm.graph, test, (mask, site.window), site.node, "mask_test")
                verdict, real = (call(gm.graph, operator.getitem, (told, i), site.node) for i in (0, 1))
            known = tested[mask, site.window] = (verdict, real, len(state.prompt_masks))
            state.prompt_masks.append(PromptMask(graph, tuple(map(inputs.index, roots))))
        verdict, real, number = known
        query, *sides = site.node.args[:3]
        with gm.graph.inserting_before(site.node):
            shared = (without_repeat(side)[0] for side in sides)  # type: ignore[arg-type]
            args = (query, *shared, verdict, real, inputs[-1], number, site.scale, site.window)
            out = call(gm.graph, torch.ops.specache.prompt_attention.default, args, site.node, "attended")
        site.node.replace_all_uses_with(out)
        gm.graph.erase_node(site.node)
    if not tested:
        return gm
    eliminate_dead_code(gm.graph)
    return finish(gm)


def _may_follow_rule(site: AttentionSite, mask: Node) -> bool:
    """Whether it masks each query's keys for all heads alike, in an operator that knows causal attention."""
    shape, query = shape_of(mask) or (), shape_of(site.query) or ()
    if site.node.target is not SDPA or len(shape) < 2 or len(query) != 4:
        return False
    q_len, kv_len = query[2], value_of(site.node.args[1]).shape[2]
    of_all = statically_known_true(shape[-2] == q_len) and statically_known_true(shape[-1] == kv_len)
    shared = len(shape) < 3 or statically_known_true(shape[-3] == 1)
    known = statically_known_true(kv_len >= q_len) and not statically_known_true(q_len == 1)
    return of_all and shared and known


def _inputs_of(gm: GraphModule, mask: Node) -> list[Node] | None:
    """The inputs that a mask is computed from; None where it can't be computed from them again."""
    needed = ancestors([mask])
    roots = [node for node in placeholders(gm.graph) if node in needed]
    weighs = (is_static_input(node) and value_of(node).dim() > 0 for node in roots)
    changed = {
        *mutated_inputs(gm.graph),
        placeholders(gm.graph)[-1],
    }  # a mask of what is cached is no mask of ours
    if any(weighs) or any(map(draws_random_numbers, needed)) or changed.intersection(roots):
        return None
    return roots


PROMPT_MASKS = Pass("prompt_masks", prompt_masks)

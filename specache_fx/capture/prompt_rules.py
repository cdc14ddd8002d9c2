"""The masks of a prompt that can be tested before they are made: `passes/prompt_masks.py` puts the tests in.

Masks that weights or random numbers go into, and those of attentions that are spelt out, are made as the model says.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.capture.graph_slices import ancestors, draws_random_numbers, extract, mutated_inputs
from specache_fx.capture.graph_utils import is_static_input, placeholders, shape_of, value_of
from specache_fx.capture.normalize_attention import SDPA
from specache_fx.capture.program import AttentionSite
from specache_fx.runtime.prompt_masks import PromptMask


def find_prompt_masks(
    gm: GraphModule, sites: Sequence[AttentionSite]
) -> tuple[tuple[PromptMask, ...], dict[Node, int]]:
    """Masks of a graph of several tokens that may follow a rule, and by attention's output the place of its mask."""
    inputs = placeholders(gm.graph)
    found: list[PromptMask] = []
    places: dict[tuple[Node, int | None], int] = {}
    rules: dict[Node, int] = {}
    # A mask of what is cached is no mask of ours.
    changed = {*mutated_inputs(gm.graph)}
    changed |= {
        root for site in sites if site.keys.past is not None for root in (site.keys.root, site.values.root)
    }
    for site in sites:
        mask = site.core.mask
        if mask is None or not _may_follow_rule(site, mask):
            continue
        key = (mask, site.keys.window)
        if key not in places:
            needed = ancestors([mask])
            roots = [node for node in inputs if node in needed]
            weighs = any(is_static_input(node) and value_of(node).dim() > 0 for node in roots)
            if weighs or any(map(draws_random_numbers, needed)) or needed & changed:
                continue
            places[key] = len(found)
            found.append(PromptMask(extract(gm, [mask], roots), tuple(map(inputs.index, roots))))
        rules[site.core.node] = places[key]
    return tuple(found), rules


def _may_follow_rule(site: AttentionSite, mask: Node) -> bool:
    """Whether it masks each query's keys for all heads alike, in an operator that knows causal attention."""
    shape, query = shape_of(mask) or (), shape_of(site.core.query) or ()
    if site.core.node.target is not SDPA or len(shape) < 2 or len(query) != 4:
        return False
    q_len, kv_len = query[2], value_of(site.core.node.args[1]).shape[2]
    of_all = statically_known_true(shape[-2] == q_len) and statically_known_true(shape[-1] == kv_len)
    shared = len(shape) < 3 or statically_known_true(shape[-3] == 1)
    known = statically_known_true(kv_len >= q_len) and not statically_known_true(q_len == 1)
    return of_all and shared and known

"""`prompt_masks`: attention of several tokens follows a rule instead of a `[q_len, kv_len]` mask where both agree.

    out = sdpa(q, k, v, mask)       ->  verdict, real = check_mask_rule(mask, window)
                                        out = specache.prompt_attention(q, k, v, verdict, real, state, number, scale)

That is a prompt, a piece of one or the next turn. A model that is given an `attention_mask` computes such a mask, 4 GB
at 65,536 tokens, even where nothing is padding: only the numbers tell. The compiler fuses the test with what computes
the mask, and nothing of it is kept. The operator reads the verdict (`runtime/graph/prompt_masks.py`). `store` goes on
reading the mask's last row. Keys and values are those of the kv heads: no copy for each query head is made.

Runs after `bind_cache`, on the attentions of `Program.rules`.
"""

from __future__ import annotations

import operator
from functools import partial

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.caches.cache_side import without_repeat
from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.graph.graph_utils import placeholders
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass
from specache_fx.passes.bind_cache import STATE
from specache_fx.runtime.graph.prompt_masks import check_mask_rule

_ATTENTION = torch.ops.specache.prompt_attention.default


@partial(Pass, optional=True)
def prompt_masks(gm: GraphModule, program: Program) -> None:
    """Test the masks of attentions."""
    if not program.rules or any(node.target is _ATTENTION for node in gm.graph.nodes):
        return
    state_node = placeholders(gm.graph)[-1]
    assert state_node.name == STATE
    tested: dict[int, list[Node]] = {}
    for site in program.sites:
        number = program.rules.get(site.core.node)
        if number is None:
            continue
        with gm.graph.inserting_before(site.core.node):
            if number not in tested:
                test = call(
                    gm.graph, check_mask_rule, (site.core.mask, site.keys.window), site.core.node, "mask_test"
                )
                # The verdict, and the real keys.
                tested[number] = [call(gm.graph, operator.getitem, (test, i), site.core.node) for i in (0, 1)]
            query, *sides = site.core.node.args[:3]
            shared = map(without_repeat, sides)  # type: ignore[arg-type]
            args = (query, *shared, *tested[number], state_node, number, site.core.scale, site.keys.window)
            out = call(gm.graph, _ATTENTION, args, site.core.node, "attended")
        site.core.node.replace_all_uses_with(out)
        gm.graph.erase_node(site.core.node)

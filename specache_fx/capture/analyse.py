"""From functional ATen to a `Program`: the graph in normal form, and all that is known of it.

Attention and caches get one form first (`newest_tokens`, `heads_first`, `attention_cores`), which
changes nothing that is computed. The rest of the analyses edit nothing. What they can't follow is a refusal, and the
graph stays the model's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.attention.flex_attention import from_flex, is_flex
from specache_fx.capture.attention.normalize_attention import from_sdpa
from specache_fx.capture.attention.run_form import from_softmax
from specache_fx.capture.caches.cache_side import grows
from specache_fx.capture.caches.heads_first import heads_first
from specache_fx.capture.caches.match_attention import match_attention, phase_of
from specache_fx.capture.graph.graph_edit import CallsOnce, finish
from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    is_float,
    is_static_input,
    placeholders,
    reads_shape_only,
    same_sizes,
    shape_of,
    weight_name,
)
from specache_fx.capture.graph.left_alone import LeaveAlone
from specache_fx.capture.positions.find_prelude import find_prelude
from specache_fx.capture.positions.find_sources import find_sources, fixed_sizes, kv_lens
from specache_fx.capture.positions.find_token import Token, find_token
from specache_fx.capture.positions.lanes import effect_of, single_lane
from specache_fx.capture.positions.mask_graphs import find_masks, find_prompt_masks
from specache_fx.capture.positions.newest_tokens import NEWEST_OF, newest_tokens
from specache_fx.capture.positions.outputs import find_logits, plan_outputs
from specache_fx.capture.program import AttentionCore, AttentionSite, Decoding, Phase, Program, Refusal
from specache_fx.config import SpecacheConfig
from specache_fx.report.progress import say_step
from specache_fx.runtime.graph.sources import Sources
from specache_fx.runtime.ops import SDPA

logger = logging.getLogger(__name__)


def analyse(gm: GraphModule, config: SpecacheConfig, positions: Collection[int] = ()) -> Program:
    """Bring a graph into normal form, and understand it.

    Args:
        gm: A functional graph; edited in place.
        config: The options.
        positions: Positions of inputs that are known to say where tokens are written.
    """
    say_step("analyse")
    start, num_nodes = time.perf_counter(), len(gm.graph.nodes)
    other_kv, newest = kv_inputs(gm), newest_tokens(gm)
    input_forms, output_forms = heads_first(gm)
    inputs = placeholders(gm.graph)
    cores, unknown = attention_cores(gm)
    token = find_token(gm.graph)
    sites, refusals = match_attention(gm, cores, unknown, config, token)
    program = Program(
        config,
        weights={i: weight_name(node) for i, node in enumerate(inputs) if is_static_input(node)},
        other_kv_inputs=tuple(other_kv),
        input_forms=input_forms,
        output_forms=output_forms,
        newest_inputs=tuple(newest),
        refusals=tuple(refusals),
    )
    if sites:
        program = _with_attention(gm, program, sites, positions, token)
    if program.phase is Phase.DECODE:
        fixed = {i: 1 for i, _ in newest if isinstance((shape_of(inputs[i]) or ())[1], int)}
        program = replace(program, fixed_sizes=program.fixed_sizes | fixed)
    logger.debug(
        "analysed: %s, %d attentions, %d refused, %d -> %d nodes, %.1f ms",
        program.phase.value,
        len(program.sites),
        len(program.refusals),
        num_nodes,
        len(gm.graph.nodes),
        1e3 * (time.perf_counter() - start),
    )
    return program


def attention_cores(gm: GraphModule) -> tuple[list[AttentionCore], dict[Node, str]]:
    """The attentions of a graph in normal form, and the nodes around which none was found, with the reason."""
    cores, unknown, calls = list[AttentionCore](), dict[Node, str](), CallsOnce()
    outputs, own = set(gm.graph.output_node().all_input_nodes), list(gm.graph.nodes)
    caches = any(len(shape_of(out) or ()) == 4 for out in outputs)
    for node in own:
        try:
            if node.target is SDPA:
                cores.append(from_sdpa(gm, node, calls))
            elif is_flex(node):
                cores.append(from_flex(gm, node, outputs, calls))
            elif caches and node.target is torch.ops.aten._softmax.default:
                cores.append(from_softmax(gm, node, outputs, calls))
        except LeaveAlone as error:
            unknown[node] = error.reason
    used = ancestors(
        [*own, *(each for core in cores for each in (core.query, core.mask, core.sinks) if each)]
    )
    for node in reversed(gm.graph.nodes):
        if node not in used:
            gm.graph.erase_node(node)
    if len(gm.graph.nodes) > len(own):
        finish(gm)
    return cores, unknown


def _with_attention(
    gm: GraphModule,
    program: Program,
    sites: Sequence[AttentionSite],
    positions: Collection[int],
    token: Token,
) -> Program:
    inputs = placeholders(gm.graph)
    past = tuple(
        inputs.index(side)
        for site in sites
        if not site.shared
        for side in (site.keys.past, site.values.past)
        if side is not None
    )
    phase = phase_of(sites)
    ids: Any = token.node
    if phase is Phase.PREFILL and ids is not None:  # a prompt's tokens are all of them
        ids = ids.meta.get(NEWEST_OF, ids)
    if phase is Phase.DECODE and ids is not None and not same_sizes((shape_of(ids) or (1,))[-1:], (1,)):
        ids = None
    sources: Sources | None = None
    if phase is Phase.DECODE:
        sources = find_sources(gm, sites, past, positions, token.node)
        fixed = fixed_sizes(inputs, past, program.input_forms, sources, ids)
        program = replace(program, fixed_sizes=fixed, kv_lens=kv_lens(inputs, past, sources))
    try:
        plan, kept = plan_outputs(gm, sites, sources)
        decoding = (
            None
            if sources is None
            else _decoding(gm, past, sites, sources, kept, Token(ids, token.vocabulary))
        )
    except LeaveAlone as no:
        refused = (Refusal(site.core.node.name, site.source, str(no), no.remedy) for site in sites)
        return replace(program, refusals=(*program.refusals, *refused))
    masks, rules = find_prompt_masks(gm, sites) if decoding is None else ((), {})
    return replace(
        program,
        phase=phase,
        sites=tuple(sites),
        past_inputs=past,
        other_kv_inputs=tuple(i for i in program.other_kv_inputs if i not in past),
        token=None if ids is None else inputs.index(ids),
        outputs=plan,
        prompt_masks=masks,
        rules=rules,
        decoding=decoding,
    )


def _decoding(
    gm: GraphModule,
    past: Sequence[int],
    sites: Sequence[AttentionSite],
    sources: Sources,
    kept: Sequence[Node],
    token: Token,
) -> Decoding:
    masks = find_masks(gm, sources, sites, of_windows=False)
    logits = find_logits(kept, token.vocabulary)
    # A cache that stays in the graph has a length of its own in each step anyhow.
    kept_cache = next((node.name for node in kept if grows(node)), None)
    static = kept_cache is None
    prelude, boundary, asserts = find_prelude(gm, sites, kept, sources, lengths_are_static=static)
    effect = effect_of(gm.graph, asserts)
    return Decoding(
        sources=sources,
        masks=masks,
        window_masks=find_masks(gm, sources, sites, of_windows=True),
        prelude=prelude,
        boundary=boundary,
        asserts=asserts,
        logits=logits,
        single_lane=effect or single_lane(gm.graph, kept, past, token.node, logits, kept_cache),
        is_pure=effect is None,
    )


def kv_inputs(gm: GraphModule) -> list[int]:
    """Inputs that could be KV tensors: 4-D, floating point, no parameters, and not read for their shape alone."""
    return [
        i
        for i, node in enumerate(placeholders(gm.graph))
        if not is_static_input(node)
        and is_float(node, 5)
        and len(shape_of(node) or ()) > 3
        and not all(reads_shape_only(user) for user in node.users)
    ]


def may_have_cache(gm: GraphModule) -> bool:
    """Whether a graph takes or returns tensors that could be KV tensors."""
    outputs = gm.graph.output_node().all_input_nodes
    return bool(kv_inputs(gm)) or any(len(shape_of(out) or ()) == 4 and is_float(out) for out in outputs)

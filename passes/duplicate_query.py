"""`duplicate_query`: the decode graph for two tokens at once, the output token and the speculative one.

    out = specache.attention(q, k, v, layer, scale)               # q [batch, num_heads, 1, key_dim]
        -> out = specache.attention_lanes(q, k, v, layer, scale)  # q [lanes, batch, num_heads, 1, key_dim]

The graph is traced again under `torch.vmap` over lanes. Token ids and prelude tensors carry a leading lane dimension.
Everything else is shared, so each weight is read once for both. `batching_rules` has the operators that vmap doesn't
know. The result is an ATen graph of static shapes whose outputs have a leading lane dimension too.

With one lane (lookahead "query" or "none", policy "kivi", or where lanes can't be had) it is traced as it is.

Unlike the passes before it, this one needs real inputs: it runs when the first decode step does.
Paper: SpeCache §3.3 and Alg. 3, "simultaneously decode two tokens".
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from specache_fx.capture.graph_edit import finish, make_module
from specache_fx.capture.graph_utils import placeholders
from specache_fx.capture.normalize_attention import SDPA
from specache_fx.capture.program import Program
from specache_fx.passes.batching_rules import fill_where_masked, register_batching_rules


def lane_inputs(gm: GraphModule, program: Program) -> list[bool]:
    """The graph's inputs that differ from lane to lane: the token ids and the prelude tensors."""
    token = None if program.decoding is None else program.decoding.sources.token
    return [
        "specache_prelude" in node.meta or (token is not None and node.meta.get("specache_input") == token)
        for node in placeholders(gm.graph)
    ]


def duplicate_query(gm: GraphModule, program: Program, inputs: Sequence[Any], lanes: int) -> GraphModule:
    """Trace the decode graph for that many lanes.

    Args:
        gm: The graph after `split_prelude`.
        program: The findings on it.
        inputs: One per placeholder; with two lanes, those of `lane_inputs` have a leading dimension of 2. Integers
            become constants of the result.
        lanes: 1 or 2.

    Returns:
        The ATen graph; its inputs are the tensors among `inputs`, in order.
    """
    tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    on_lanes, given = lane_inputs(gm, program), placeholders(gm.graph)
    for node in gm.graph.nodes:
        if node.target is SDPA:  # of an attention that is left alone
            more = dict(zip(("scale", "enable_gqa"), node.args[6:], strict=True))
            node.target, node.args, node.kwargs = F.scaled_dot_product_attention, node.args[:6], more

    def one_lane(*values: torch.Tensor) -> Any:
        full = list(inputs)
        for i, value in zip(tensors, values, strict=True):
            full[i] = value
        return Interpreter(gm).run(*full)  # not gm(...): new nodes shall know the lines of the model

    function = one_lane
    if lanes > 1:
        register_batching_rules()
        fill_where_masked(gm.graph)
        in_dims = tuple(0 if on_lanes[i] else None for i in tensors)
        function = torch.vmap(one_lane, in_dims=in_dims, randomness="different")
    trace = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)
    with torch.no_grad(), preserve_node_meta(), warnings.catch_warnings():
        # Operators without a batching rule run once a lane, and there are two: a warning would help no user.
        warnings.filterwarnings("ignore", "There is a performance drop")
        traced = trace(*(inputs[i] for i in tensors))
    for node, i in zip(placeholders(traced.graph), tensors, strict=True):
        node.meta["specache_name"] = given[i].name
    return finish(make_module(traced, traced.graph))

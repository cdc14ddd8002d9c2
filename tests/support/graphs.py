"""Real Dynamo graphs, caught on their way to a backend, and the passes run over them one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support.models import TinyConfig, TinyDecoder
from support.zoo import build
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from specache_fx.capture.analyse import analyse
from specache_fx.capture.graph.graph_utils import placeholders, value_of
from specache_fx.capture.graph.trace import trace
from specache_fx.capture.program import Phase, Program
from specache_fx.config import SpecacheConfig
from specache_fx.lowering import fused_layers
from specache_fx.passes.duplicate_query import duplicate_query, lane_inputs
from specache_fx.passes.pipeline import BINDING_PASSES, run_passes
from specache_fx.runners.border import as_taken


@dataclass(frozen=True)
class Captured:
    """One graph of Dynamo's with the inputs of the call that made it."""

    gm: GraphModule
    inputs: tuple[Any, ...]

    def copy(self) -> GraphModule:
        """As functional ATen, for passes to edit."""
        return trace(self.gm)


class FunctionModule(nn.Module):
    """Makes a module of a function over tensors, so that Dynamo sees no parameter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


@dataclass
class Recorder:
    """A `torch.compile` backend that keeps every graph and runs it as it is."""

    graphs: list[Captured] = field(default_factory=list)

    def __call__(self, gm: GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        slot = len(self.graphs)
        self.graphs.append(Captured(gm, tuple(example_inputs)))

        def run(*args: Any) -> Any:
            self.graphs[slot] = Captured(gm, args)  # real tensors: Dynamo's example inputs are fake
            return gm(*args)

        return run


@torch.no_grad()
def capture(model: nn.Module, drive: Callable[[Any], Any]) -> list[Captured]:
    """The graphs that `drive(compiled model)` makes Dynamo trace."""
    torch._dynamo.reset()
    recorder = Recorder()
    drive(torch.compile(model, backend=recorder))
    torch._dynamo.reset()
    return recorder.graphs


def traced(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """The functional graph of a function of tensors, which are its inputs in their order."""
    (taken,) = capture(FunctionModule(function), lambda model: model(*inputs))
    gm = taken.copy()
    given = placeholders(gm.graph)
    for node in sorted(given, key=lambda node: int("".join(filter(str.isdigit, node.name)))):
        given[-1].append(node)  # Dynamo has them as they are first read
        given.append(node)
    gm.recompile()
    return gm


_CALLS = ((0, 6), (6, 9), (9, 10), (10, 11))


def _batch() -> tuple[Tensor, Tensor]:
    """Two rows of token ids and their mask; the first has two tokens of padding."""
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :2] = False
    return torch.randint(1, 61, (2, 11), generator=torch.Generator().manual_seed(0)), mask


def drive_tiny(forward: Any, padded: bool = True) -> None:
    """Prompt of 6, extend by 3, two decode steps, for a batch of 2."""
    (ids, mask), past = _batch(), None
    for start, stop in _CALLS:
        keys = mask[:, :stop] if padded else None
        _, past = forward(ids[:, start:stop], past=past, attention_mask=keys)


def drive_transformers(forward: Any) -> None:
    """The same for a transformers causal LM."""
    (ids, mask), past = _batch(), None
    for start, stop in _CALLS:
        keys = mask[:, :stop].long()
        out = forward(ids[:, start:stop], attention_mask=keys, past_key_values=past, use_cache=True)
        past = out.past_key_values


def drive_own(forward: Any) -> None:
    """The same for an `OwnDecoder`."""
    (ids, mask), cache = _batch(), list[Any]()
    for start, stop in _CALLS:
        _, *cache = forward(ids[:, start:stop], mask[:, :stop], *cache)


def tiny_llama(attention: str = "sdpa") -> nn.Module:
    """A transformers llama of one layer, random weights."""
    return build("llama", num_hidden_layers=1, attn_implementation=attention).requires_grad_(False)


def tiny_decoder(**changes: Any) -> TinyDecoder:
    """A one-layer `TinyDecoder`."""
    return TinyDecoder(TinyConfig(**{"num_layers": 1, **changes}))


def matched(captured: Captured) -> Program:
    """What the analyses say about a graph."""
    return analyse(captured.copy(), SpecacheConfig())


def by_phase(graphs: list[Captured]) -> dict[Phase, Captured]:
    """The last graph of each phase (its shapes are the dynamic ones)."""
    return {matched(captured).phase: captured for captured in graphs}


def decode_inputs(gm: GraphModule, program: Program, args: tuple[Any, ...], lanes: int) -> list[Any]:
    """What `duplicate_query` is given: as the runner binds them, the speculative token being the token itself."""
    assert program.decoding is not None
    boundary = program.decoding.prelude.now(args)
    inputs: list[Any] = []
    for node, per_lane in zip(placeholders(gm.graph), lane_inputs(gm, program), strict=True):
        cut = node.meta.get("specache_prelude")
        value = boundary[cut] if cut is not None else args[node.meta["specache_input"]]
        inputs.append(torch.stack([value, value]) if per_lane and lanes > 1 else value)
    return inputs


def decode_graph(captured: Captured, config: SpecacheConfig) -> tuple[GraphModule, Program]:
    """The decode graph as the first of `DECODE_PASSES` gets it."""
    gm, program = bound(captured, config)
    assert program.phase is Phase.DECODE
    lanes, args = config.num_lanes, tuple(as_taken(program, captured.inputs))
    program = replace(program, fused=fused_layers(program, "cpu", lanes))
    return duplicate_query(gm, program, decode_inputs(gm, program, args, lanes), lanes), program


def bound(captured: Captured, config: SpecacheConfig | None = None) -> tuple[GraphModule, Program]:
    """A copy of a graph after `BINDING_PASSES`, and what is known of it."""
    gm = captured.copy()
    program = analyse(gm, config or SpecacheConfig())
    return run_passes(gm, program, BINDING_PASSES[program.phase]), program


def code(gm: GraphModule) -> str:
    """The whole graph, one line a node, with the passes' own marks: equal strings are equal graphs."""
    return "\n".join(
        f"{node.format_node()} {sorted(key for key in node.meta if key.startswith('specache'))}"
        for node in gm.graph.nodes
    )


def calls(gm: GraphModule) -> str:
    """The `specache::` calls and SDPAs, one line each, arguments by name; names without FX's "_default"."""
    lines = []
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
        ours = str(node.target).startswith("specache.") or name == "scaled_dot_product_attention"
        if node.op == "call_function" and ours:
            lines.append(f"{node.name} = {name}({', '.join(map(str, node.args))})")
    return "\n".join(lines).replace("_default", "")


def nodes_of(gm: GraphModule, op: Any) -> list[Node]:
    """The calls of one operator."""
    return [node for node in gm.graph.nodes if node.target is op]


def has_value(node: Node) -> bool:
    """Whether a node carries its fake value; operators without a result have None for it."""
    return "example_value" in node.meta or "val" in node.meta or value_of(node) is not None

"""`explain`: run a model once and report each of its attentions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from specache_fx.backend import Backend, check_names
from specache_fx.capture.analyse import may_have_cache
from specache_fx.capture.graph.graph_utils import shape_of, target_name, value_of
from specache_fx.capture.program import Phase, Program, Refusal, merged_messages
from specache_fx.compiled import uncompiled, with_generators
from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.lowering import Compiled
from specache_fx.runners.border import AtBorder, UnwrapSubclasses
from specache_fx.runners.decode_runner import Decode
from specache_fx.runners.fixed_runner import FixedCacheRunner
from specache_fx.runtime.native.products import is_products
from specache_fx.saved.fingerprint import check_ids

_SDPA = "scaled_dot_product_attention"
_APPENDS = ("cat", "concat", "concatenate")
_GAP = 6  # most nodes between two calls that belong to one attention


@dataclass
class GraphReport:
    """The report on one graph of Dynamo's.

    Attributes:
        phase: Prefill, extend, decode, or no cache.
        rewritten: Source line of each rewritten attention.
        refusals: The attentions that were left alone.
        lanes: Tokens that a decode step computes at once; 0 in other phases.
        selection: The pairs that a decode step attends to at 16 bits; "" in other phases.
        fallback: Why there is one lane though two were asked for.
        resident: Layers that stay whole on the device (`resident_layers`) of a decode graph.
        left_alone: Why the graph runs as the model wrote it; None if it was rewritten.
        has_cache: Whether it takes or returns tensors that could be a KV cache.
        before: The first attention as Dynamo saw it.
        after: The same, rewritten.
        runs: The code of a decode graph that runs in place of `after`, where C++ does all of a layer; else empty.
    """

    phase: Phase
    rewritten: list[str]
    refusals: list[Refusal]
    lanes: int = 0
    selection: str = ""
    fallback: str | None = None
    resident: int = 0
    left_alone: str | None = None
    has_cache: bool = False
    before: str = ""
    after: str = ""
    runs: str = ""


@dataclass
class Explanation:
    """Every graph that the run compiled, in order. `print` it.

    Attributes:
        graphs: The graphs.
        is_driven: Whether the caller gave a `run`.
        uncompiled: Of each frame that Dynamo skips though it attends over a cache, why.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    is_driven: bool = False
    uncompiled: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines: list[str] = []
        first: dict[str, int] = {}  # graph of each reason
        for i, graph in enumerate(self.graphs):
            lanes = f", {graph.lanes} lane{'s' if graph.lanes > 1 else ''}" if graph.lanes else ""
            unread = graph.phase is Phase.NO_CACHE and graph.has_cache
            lines.append(
                f"graph {i}: {'left alone' if unread else graph.phase.value}{lanes}, {len(graph.rewritten)} attention"
                f"{'' if len(graph.rewritten) == 1 else 's'} rewritten, {len(graph.refusals)} left alone"
            )
            lines += [f"  rewritten: {source}" for source in dict.fromkeys(graph.rewritten)]
            lines += [f"  {message}" for message in merged_messages(graph.refusals)]
            if graph.left_alone:
                earlier = first.setdefault(graph.left_alone, i)
                lines.append(
                    f"  {graph.left_alone}" if earlier == i else f"  for the reason of graph {earlier}"
                )
            if graph.selection:
                lines.append(f"  exact pairs: {graph.selection}")
            if graph.fallback:
                lines.append(f'  lookahead "query" instead of "token": {graph.fallback}')
            if graph.resident:
                lines.append(
                    f"  the first {graph.resident} of the layers that keep all tokens: whole on the device"
                )
            if graph.after:
                lines += ["  before:", graph.before, "  after:", graph.after]
            if graph.runs:
                lines += ["  run as one call:", graph.runs]
        if self.graphs and not any(graph.has_cache for graph in self.graphs):
            lines.append(
                "No graph takes or returns a KV cache as 4-D tensors: the model has none, or was called without"
                " (use_cache=False?)."
            )
        elif (
            self.graphs and not self.is_driven and all(graph.phase is Phase.PREFILL for graph in self.graphs)
        ):
            lines.append("Only a prompt was run: give explain() a run= that makes a prompt and a few steps.")
        lines += dict.fromkeys(self.uncompiled)
        nothing = "Nothing was compiled: `run` has to call the module it is given. Its generate() runs the plain model."
        return "\n".join(lines) if lines else nothing


class _Recorder:
    """A backend that records the passes' results."""

    def __init__(self, backend: Backend, options: dict[str, Any]) -> None:
        self.backend, self.options = backend, options
        self.explanation = Explanation()

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Compiled:
        report = GraphReport(Phase.NO_CACHE, [], [])

        def observe(name: str, graph: GraphModule, program: Program) -> None:
            if name == "dynamo":
                report.before, report.has_cache = _around_attention(graph), may_have_cache(graph)
            report.phase, report.refusals = program.phase, list(program.refusals)
            report.left_alone = program.left_alone
            report.rewritten = [site.source for site in program.sites]
            report.has_cache |= bool(program.sites)  # in buffers of the model
            if name == "fuse_layer_steps":
                found = _around_attention(graph)
                report.runs = found if found != report.after else ""
            if name == "verify":  # of a decode graph, which its runner had made
                decode = runner
                while isinstance(decode, (AtBorder, FixedCacheRunner, UnwrapSubclasses)):
                    decode = decode.runner
                assert isinstance(decode, Decode)
                report.lanes, report.fallback = decode.lanes, decode.fallback
                report.selection = program.config.selection
                report.resident = len(program.exact_layers - program.window_layers)
                report.after = _around_attention(graph)

        runner = self.backend(gm, example_inputs, options=self.options, observe=observe)
        self.explanation.graphs.append(report)  # not before: Dynamo may trace it once more
        return runner

    def given_up(self, frame: Any, error: Exception, _: Any) -> None:
        """Called as the backend's is."""
        message = self.backend.given_up(frame, error, self.options)
        self.explanation.uncompiled += [] if message is None else [message]


def _is_attention(node: Node) -> bool:
    ours = "specache" in str(node.target) and not is_products(node.target)
    return ours or target_name(node) == _SDPA


def _around_attention(gm: GraphModule) -> str:
    """The graph's first attention and its operands' nodes, one line a node."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    found = [i for i, node in enumerate(nodes) if _is_attention(node)]
    if not found:
        return ""
    first = nodes[found[0]]
    if target_name(first) == _SDPA:
        shown = {first, *_back_to_cat(first)}
        return "\n".join(f"    {_line(node)}" for node in nodes if node in shown)
    last = found[0]
    for i in found:
        if i - last <= _GAP:
            last = i
    return "\n".join(f"    {_line(node)}" for node in nodes[found[0] : last + 1])


def _back_to_cat(attention: Node) -> set[Node]:
    """The appends to the cache that an attention reads, and the nodes between them and its keys and values."""
    shown: set[Node] = set()
    for side in attention.args[1:3]:
        path: list[Node] = []
        node: Any = side
        while isinstance(node, Node) and node.op.startswith("call"):
            path.append(node)
            if target_name(node) in _APPENDS:
                shown.update(path)
                break
            node = node.args[0] if node.args else None
    return shown


def _line(node: Node) -> str:
    shape = shape_of(node)
    dtype = str(value_of(node).dtype).removeprefix("torch.") if shape is not None else ""
    name = str(node.target).removesuffix(".default") if "specache" in str(node.target) else target_name(node)
    kwargs = [f"{key}={value}" for key, value in node.kwargs.items()]
    result = f"  # {dtype}{list(shape)}" if shape is not None else ""
    return f"{node.name} = {name}({', '.join([*map(str, node.args), *kwargs])}){result}"


def explain(
    model: nn.Module,
    *,
    options: dict[str, Any] | None = None,
    run: Callable[[nn.Module], Any] | None = None,
    **inputs: Any,
) -> Explanation:
    """Run a model for a few tokens and report each attention: rewritten and how, or left alone and why.

    The model is not changed: it is compiled aside, without Inductor. Dynamo is reset before and after
    (`torch._dynamo.reset()`), so other models that are compiled in this process compile anew at their next call.

    Args:
        model: A transformers model, or any module; compiled or not.
        options: See `SpecacheConfig`.
        run: Drives a model without `generate()`: called with the compiled model; should make it run a prompt and a
            few decode steps.
        **inputs: For `generate()`, such as `input_ids` and `attention_mask`; for a model without `generate()` and
            with no `run`, one call's arguments.

    Returns:
        A report to print.

    Raises:
        ConfigError: On unknown or bad options, where `input_ids` for `generate()` are no integers `[batch, tokens]`, or
            where there is nothing to run the model with.
    """
    check_names(SpecacheConfig.from_options(options))
    ids = inputs.get("input_ids")
    if isinstance(ids, str) or (ids is not None and hasattr(model, "generate")):
        check_ids(cast(Any, ids))
    recorder = _Recorder(Backend(), {**(options or {}), "lowering": "eager", "compile_prefill": False})
    recorder.explanation.is_driven = run is not None
    model = getattr(model, "_orig_mod", model)  # a wrapper of torch.compile
    torch._dynamo.reset()
    try:
        compiled: Any = torch.compile(model, backend=recorder)
        with torch.no_grad():
            if run is not None:
                run(compiled)
            elif hasattr(model, "generate"):
                if not inputs and cast(Any, model).generation_config.bos_token_id is None:
                    raise ConfigError("explain() runs the model: give it input_ids=..., or run=.")
                with uncompiled(model):
                    for inner in with_generators(model):
                        inner._compiled_call_impl = compiled.dynamo_ctx(inner._call_impl)
                    cast(Any, model).generate(**{"max_new_tokens": 4, "do_sample": False, **inputs})
            else:
                compiled(**inputs)
    finally:
        torch._dynamo.reset()
    return recorder.explanation

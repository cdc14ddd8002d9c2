"""From a rewritten graph to something that runs: Inductor, or the graph itself.

Inductor compiles the decode step, which runs once a token. A prompt runs as it was traced. Products and attention take
nearly all of its time, and Inductor would compile each new kind of prompt for longer than most prompts take. Inductor
does compile the tests of a prompt's masks (`passes/prompt_masks.py`): fused, they keep no mask in memory. It compiles
all of a prompt whose attention is spelt out, which it fuses.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specache_fx._log import warn_once
from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.graph.graph_slices import ancestors, eliminate_dead_code, extract
from specache_fx.capture.graph.graph_utils import placeholders, shape_of, symbols_of, value_of
from specache_fx.capture.graph.segments import Segment
from specache_fx.capture.program import AttentionSite, Program
from specache_fx.config import Lowering
from specache_fx.direct import inductor_start
from specache_fx.errors import first_line
from specache_fx.report.progress import announced, say_step
from specache_fx.runners.layer_parts import compile_by_layer, target
from specache_fx.runtime.graph.prompt_masks import check_mask_rule
from specache_fx.runtime.kernels import KERNELS, LayerForm
from specache_fx.runtime.ops import SDPA
from specache_fx.runtime.quant import make_quantizer
from specache_fx.runtime.steps.step_table import empty_state

Compiled = Callable[..., Any]
logger = logging.getLogger(__name__)

_NUMBERS_A_THREAD = 2**15
"""With fewer, a kernel of a decode step has one thread: others take longer to come, most of all on a busy machine."""


def example_state(num_layers: int) -> torch.Tensor:
    """An example of the `state` input, fake where Dynamo's own example inputs are."""
    context = TracingContext.try_get()
    state = empty_state(num_layers)
    return state if context is None or context.fake_mode is None else context.fake_mode.from_tensor(state)


def layer_form(program: Program, site: AttentionSite, lanes: int) -> LayerForm:
    """The form of an attention in a decode step of so many lanes: a kernel accepts or refuses it."""
    config, is_exact = program.config, site.layer in program.exact_layers
    sides = [value_of(node) for node in (site.core.query, site.keys.new, site.values.new)]
    return LayerForm(
        dtypes=frozenset(side.dtype for side in sides),
        quantizer=None if is_exact else make_quantizer(config),
        key_dim=site.shape.key_dim,
        value_dim=site.shape.value_dim,
        lanes=lanes,
        num_queries=lanes * sides[0].shape[1] // site.shape.num_kv_heads,
        expands=site.expansion is not None,
        aggregation=config.aggregation,
        cpu_reads=config.cpu_reads and not is_exact,
    )


def fused_layers(program: Program, kernel: str | None, lanes: int) -> dict[int, OpOverload]:
    """`Program.fused` of a session whose whole steps `kernel` runs (`FusedSteps.kernel`), or none.

    A layer that several attentions share keeps its operators.
    """
    ops = torch.ops.specache
    shared = {site.layer for site in program.sites if site.shared}
    forms = {site.layer: layer_form(program, site, lanes) for site in program.owners} if kernel else {}
    return {
        layer: ops.layer_step.default if kernel == "cpu" else ops.device_step.default
        for layer, form in forms.items()
        if layer not in shared
        and (not form.expands if kernel == "aten" else KERNELS[str(kernel)].misfit(form) is None)
    }


def lower(gm: GraphModule, inputs: Sequence[Any], lowering: Lowering) -> Compiled:
    """Compile a graph of Dynamo's, in Dynamo's context.

    Args:
        gm: The graph.
        inputs: Example inputs, as Dynamo gave them.
        lowering: "inductor" or "eager".
    """
    if lowering == "eager":
        return gm.forward
    from torch._inductor.compile_fx import compile_fx  # imported late: it loads all of Inductor
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    say_step("Inductor")
    inductor_start.wait()
    try:
        compiled: Any = compile_fx(gm, list(inputs))
        return compiled
    except InductorError as error:
        cause = error.inner_exception
        why = f"Inductor fails to compile a graph ({type(cause).__name__}: {first_line(cause)})"
        remedy = "Please report it"
        if isinstance(cause, InvalidCxxCompiler):
            why, remedy = "Inductor finds no C++ compiler", "Install one, or name one by CXX"
        meant = f'{remedy}; lowering="eager" says that this is meant'
        warn_once(logger, f"{why}, so it runs operator by operator. {meant}")
        return gm.forward


def lower_prompt(gm: GraphModule, inputs: Sequence[Any], program: Program, what: str) -> Compiled:
    """Make a graph of several tokens run, in Dynamo's context: operator by operator, or compiled.

    Args:
        gm: The graph: a prompt, or tokens that follow a cache. Edited where it tests masks.
        inputs: Example inputs, as Dynamo gave them.
        program: The findings on it.
        what: Name of the graph, for the user.
    """
    config, layers = program.config, len(program.owners)
    if config.lowering == "eager":
        return gm.forward
    spelt_out = any(site.core.node.target is not SDPA for site in program.sites)
    tests = [node for node in gm.graph.nodes if node.target is check_mask_rule]
    if config.compile_prefill or spelt_out:
        with announced(what, config.lowering, layers):
            return lower(gm, inputs, config.lowering)
    if tests:
        with announced(f"the masks of {what}", config.lowering):
            _compile_tests(gm, ancestors(tests), inputs)
    return gm.forward


def _compile_tests(gm: GraphModule, inside: set[Node], inputs: Sequence[Any]) -> None:
    """Have one compiled function compute the tests of masks, and the rows of masks that are read besides.

    Args:
        gm: The graph.
        inside: The tests and their operands.
        inputs: Example inputs of the graph.
    """
    given = placeholders(gm.graph)
    sizes = _unbound_sizes(gm.graph, [node for node in given if node in inside])
    items = (operator.getitem, torch.ops.aten.select.int)
    for node in gm.graph.nodes:
        if node.target in items and inside.issuperset(node.all_input_nodes):
            inside.add(node)
    tests = Segment.of(node for node in gm.graph.nodes if node in inside and node.op != "placeholder")
    results = [node for node in tests.results if isinstance(value_of(node), torch.Tensor)]
    roots = [*(node for node in given if node in tests.inputs), *sizes]
    part = extract(gm, results, roots)
    end = part.graph.output_node()
    with part.graph.inserting_before(end):
        end.args = (tuple(_computed(part.graph, each) for each in end.all_input_nodes),)
    part.recompile()
    # Where Dynamo has found two symbols to be one, sizes have the one that a sum has, too.
    examples = [value_of(node) if node in sizes else inputs[given.index(node)] for node in roots]
    examples = [each + 0 if isinstance(each, torch.SymInt) else each for each in examples]
    compiled = lower(part, examples, "inductor")
    first = next(node for node in gm.graph.nodes if node.op != "placeholder" and node not in sizes)
    with gm.graph.inserting_before(first):
        outputs = gm.graph.call_function(target(compiled), tuple(roots))
        for number, node in enumerate(results):
            node.replace_all_uses_with(gm.graph.call_function(operator.getitem, (outputs, number)))
    eliminate_dead_code(gm.graph)
    gm.recompile()


def _unbound_sizes(graph: Graph, roots: Sequence[Node]) -> list[Node]:
    """Insert the sizes of other inputs that sizes of some are sums of: Inductor doesn't solve for them.

    Args:
        graph: A graph.
        roots: Some of its inputs.
    """
    given = placeholders(graph)
    sums = set().union(*(symbols_of(size) for root in roots for size in shape_of(root) or ()))
    missing = sums - {size.node.expr for root in roots for size in shape_of(root) or () if symbols_of(size)}
    found: dict[object, Node] = {}
    for node in given:
        for dim, size in enumerate(shape_of(node) or ()):
            if symbols_of(size) and size.node.expr in missing - found.keys():
                with graph.inserting_after(given[-1]):
                    made = call(graph, torch.ops.aten.sym_size.int, (node, dim), node)
                found[size.node.expr] = made
    return list(found.values())


def _computed(graph: Graph, result: Node) -> Node:
    """The same numbers, negated twice. A row that is a view, or Inductor's clone of one, keeps its mask in memory."""
    negate = torch.logical_not if value_of(result).dtype == torch.bool else torch.neg
    return graph.call_function(negate, (graph.call_function(negate, (result,)),))


def lower_static(
    gm: GraphModule, inputs: Sequence[torch.Tensor], lowering: Lowering, *, by_layer: bool = False
) -> Compiled:
    """Compile a traced graph of static shapes, at run time (decode).

    Args:
        gm: The graph.
        inputs: Real inputs.
        lowering: "inductor" or "eager".
        by_layer: Compile equal layers once: where steps are replayed, and one operator steps each layer.
    """
    if lowering == "eager":
        return gm.forward
    parts = compile_by_layer(gm, inputs, _compile_static) if by_layer else None
    return _compile_static(gm, inputs) if parts is None else parts


def _compile_static(gm: GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
    from torch._inductor import config  # imported late: it loads all of Inductor

    # A context of its own: Dynamo's belongs to the graph that this one was made from.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)), config.patch({"cpp.min_chunk_size": _NUMBERS_A_THREAD}):
        # AOTAutograd can't make examples of inference tensors that ask for gradients: weights may be such.
        return lower(gm, [mode.from_tensor(each.detach(), static_shapes=True) for each in inputs], "inductor")

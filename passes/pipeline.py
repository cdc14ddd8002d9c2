"""The passes in their order, and how they are run.

A graph of Dynamo's, as functional ATen (`capture/trace.py`), goes through `BINDING_PASSES` when it is compiled. A
decode graph goes on through `duplicate_query` and `decode_passes` when its first step runs, with that step's inputs:
shapes are static from then on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch._logging import trace_structured
from torch.fx import GraphModule

from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass
from specache_fx.passes.bind_cache import BIND_CACHE
from specache_fx.passes.duplicate_query import duplicate_query
from specache_fx.passes.few_row_products import FEW_ROW_PRODUCTS, PRODUCTS_OF_TURNS
from specache_fx.passes.fuse_layer_steps import fuse_layer_steps_of
from specache_fx.passes.insert_prefetch import INSERT_PREFETCH
from specache_fx.passes.insert_waits import INSERT_WAITS
from specache_fx.passes.prompt_masks import PROMPT_MASKS
from specache_fx.passes.quantize_attention import QUANTIZE_ATTENTION
from specache_fx.passes.select_topk import SELECT_TOPK
from specache_fx.passes.split_prelude import SPLIT_PRELUDE
from specache_fx.passes.verify import VERIFY
from specache_fx.progress import say_step

logger = logging.getLogger(__name__)

BINDING_PASSES: tuple[Pass, ...] = (BIND_CACHE, PROMPT_MASKS, PRODUCTS_OF_TURNS, SPLIT_PRELUDE)
_DECODE_PASSES: tuple[Pass, ...] = (
    QUANTIZE_ATTENTION,
    SELECT_TOPK,
    INSERT_PREFETCH,
    INSERT_WAITS,
    FEW_ROW_PRODUCTS,
    VERIFY,
)

OPTIONAL = {step.name for step in (*BINDING_PASSES, *_DECODE_PASSES) if step.optional} | {"fuse_layer_steps"}
"""Names that `skip_passes` may have: the model's answers are the same without these passes."""

Observer = Callable[[str, GraphModule, Program], None]
"""Called with a pass's name, the graph that it left and the graph's `Program`.

First with "dynamo" and Dynamo's graph, then with "analyse" and the graph in normal form, or with "leave_alone".
"""


def decode_passes(whole: str | None) -> tuple[Pass, ...]:
    """The passes of a decode graph that come after `duplicate_query`.

    Args:
        whole: The kernel that runs a layer's step as one operator (`WholeSteps.kernel`); None for none.
    """
    return _DECODE_PASSES if whole is None else (*_DECODE_PASSES, fuse_layer_steps_of(whole))


def _calls(gm: GraphModule) -> Counter[str]:
    """The number of calls of each operator in a graph; nothing where no log shows it."""
    if not logger.isEnabledFor(logging.DEBUG):
        return Counter()
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def run_passes(
    gm: GraphModule, program: Program, passes: Sequence[Pass], observe: Observer | None = None
) -> GraphModule:
    """Run passes in order, those that `skip_passes` names left out; op counts and time go to the debug log."""
    for step in passes:
        if step.name in program.config.skip_passes:
            logger.debug("%s: skipped", step.name)
            continue
        say_step(step.name)
        before, start = _calls(gm), time.perf_counter()
        gm = step.run(gm, program)
        seconds, after = time.perf_counter() - start, _calls(gm)
        changes = "".join(
            f", {op} {after[op] - before[op]:+d}" for op in sorted(before | after) if after[op] != before[op]
        )
        logger.debug(
            "%s: %d -> %d nodes, %.1f ms%s", step.name, before.total(), after.total(), 1e3 * seconds, changes
        )
        if observe is not None:
            observe(step.name, gm, program)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {
            "name": f"specache_{program.phase.name.lower()}_{passes[-1].name}",
            "encoding": "string",
        },
        payload_fn=lambda: gm.print_readable(print_output=False),
    )
    return gm


def build_decode_graph(
    gm: GraphModule,
    program: Program,
    inputs: Sequence[Any],
    lanes: int,
    observe: Observer | None = None,
    *,
    whole: str | None = None,
) -> GraphModule:
    """The whole way from a decode graph after `BINDING_PASSES` to the one that is compiled.

    See `duplicate_query` for the first step's `inputs` and `lanes`, and `decode_passes` for `whole`.
    """
    say_step("duplicate_query")
    traced = duplicate_query(gm, program, inputs, lanes)
    if observe is not None:
        observe("duplicate_query", traced, program)
    return run_passes(traced, program, decode_passes(whole), observe)

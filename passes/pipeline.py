"""The passes in their order, and how they are run.

A graph of Dynamo's, as functional ATen (`capture/graph/trace.py`), goes through `BINDING_PASSES` when it is compiled. A
decode graph goes on through `duplicate_query` and `DECODE_PASSES` when its first step runs, with that step's inputs:
shapes are static from then on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch._logging import trace_structured
from torch.fx import GraphModule

from specache_fx.capture.program import Phase, Program
from specache_fx.passes.base import Pass
from specache_fx.passes.bind_cache import bind_cache
from specache_fx.passes.duplicate_query import duplicate_query
from specache_fx.passes.few_row_products import few_row_products
from specache_fx.passes.fuse_layer_steps import fuse_layer_steps
from specache_fx.passes.insert_prefetch import insert_prefetch
from specache_fx.passes.insert_waits import insert_waits
from specache_fx.passes.prompt_masks import prompt_masks
from specache_fx.passes.quantize_attention import quantize_attention
from specache_fx.passes.select_topk import select_topk
from specache_fx.passes.split_prelude import split_prelude
from specache_fx.passes.verify import verify, verify_form
from specache_fx.report.progress import say_step

logger = logging.getLogger(__name__)

BINDING_PASSES: dict[Phase, tuple[Pass, ...]] = {
    Phase.NO_CACHE: (),
    Phase.PREFILL: (bind_cache, prompt_masks),
    Phase.EXTEND: (bind_cache, prompt_masks, few_row_products),
    Phase.DECODE: (bind_cache, split_prelude),
}
DECODE_PASSES: tuple[Pass, ...] = (
    quantize_attention,
    select_topk,
    insert_prefetch,
    insert_waits,
    few_row_products,
    verify,
    fuse_layer_steps,
)

OPTIONAL = {step.name for step in (*sum(BINDING_PASSES.values(), ()), *DECODE_PASSES) if step.optional}
"""Names that `skip_passes` may have: the model's answers are the same without these passes."""

verify_each = False
"""Whether `verify_form` runs after every pass. It also does where the passes' debug log is on."""

Observer = Callable[[str, GraphModule, Program], None]
"""Called with a pass's name, the graph that it left and the graph's `Program`.

First with "dynamo" and Dynamo's graph, then with "analyse" and the graph in normal form, or with "leave_alone".
"""


def _calls(gm: GraphModule) -> Counter[str]:
    """The number of calls of each operator in a graph; nothing where no log shows it."""
    if not logger.isEnabledFor(logging.DEBUG):
        return Counter()
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def run_passes(
    gm: GraphModule, program: Program, passes: Sequence[Pass], observe: Observer | None = None
) -> GraphModule:
    """Run passes in order, those that `skip_passes` names left out.

    The debug log gets op counts and time, and has each pass's graph checked.
    """
    for step in passes:
        if step.name in program.config.skip_passes:
            logger.debug("%s: skipped", step.name)
            continue
        say_step(step.name)
        before, start = _calls(gm), time.perf_counter()
        gm = step(gm, program)
        seconds, after = time.perf_counter() - start, _calls(gm)
        changes = "".join(
            f", {op} {after[op] - before[op]:+d}" for op in sorted(before | after) if after[op] != before[op]
        )
        logger.debug(
            "%s: %d -> %d nodes, %.1f ms%s", step.name, before.total(), after.total(), 1e3 * seconds, changes
        )
        if verify_each or logger.isEnabledFor(logging.DEBUG):
            verify_form(gm)
        if observe is not None:
            observe(step.name, gm, program)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {
            "name": f"specache_{program.phase.name.lower()}_{passes[-1].name if passes else 'analyse'}",
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
) -> GraphModule:
    """The whole way from a decode graph after `BINDING_PASSES` to the one that is compiled.

    See `duplicate_query` for the first step's `inputs` and `lanes`.
    """
    duplicate = Pass(partial(duplicate_query, inputs=inputs, lanes=lanes))
    return run_passes(gm, program, (duplicate, *DECODE_PASSES), observe)

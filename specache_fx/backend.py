"""The `torch.compile` backend: from Dynamo's graph to a runner."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from specache_fx._log import warn_once
from specache_fx.capture.analyse import analyse, attention_cores, kv_inputs, may_have_cache
from specache_fx.capture.attention.flex_attention import masks_alone_as_sdpa
from specache_fx.capture.caches.buffer_reads import BufferRead, buffer_reads, has_past, writes_tokens
from specache_fx.capture.caches.fixed_caches import grow
from specache_fx.capture.caches.unknown_forms import CACHE_SO, reader_of
from specache_fx.capture.graph.dynamo_graph import needs_gradients
from specache_fx.capture.graph.graph_edit import fake_mode_of
from specache_fx.capture.graph.graph_slices import mutated_inputs
from specache_fx.capture.graph.graph_utils import (
    device_kind,
    placeholders,
    reads_shape_only,
    value_of,
)
from specache_fx.capture.graph.left_alone import GROWING, LEAVE, LeaveAlone, sdpa_instead
from specache_fx.capture.graph.subclasses import flatten
from specache_fx.capture.graph.trace import TraceError, trace
from specache_fx.capture.program import Phase, Program, Refusal, merged_messages
from specache_fx.config import SpecacheConfig
from specache_fx.direct.traced_values import Values, values_behind
from specache_fx.dynamo import dynamo_hooks, graph_breaks
from specache_fx.dynamo.retrace import trace_as_growing
from specache_fx.errors import ConfigError, SpecacheError, UnsupportedGraphError
from specache_fx.lowering import Compiled, example_state, layer_form, lower, lower_prompt
from specache_fx.passes.pipeline import BINDING_PASSES, OPTIONAL, Observer, run_passes
from specache_fx.resets import reset
from specache_fx.runners.base import Extend, LeftAlone, Prefill, compiling
from specache_fx.runners.border import AtBorder, UnwrapSubclasses
from specache_fx.runners.decode_runner import Decode
from specache_fx.runners.fixed_runner import FixedCacheRunner, Growing
from specache_fx.runtime.handles.handle_form import is_laid_out
from specache_fx.runtime.host.host_blocks import check_host_dir, resolve_host
from specache_fx.runtime.kernels import check_forms, check_kernel, choose_kernel
from specache_fx.runtime.quant import make_quantizer

logger = logging.getLogger(__name__)


def check_names(config: SpecacheConfig) -> None:
    """Refuse unknown quantisers and kernels at once, not in the first prompt.

    Raises:
        ConfigError: On an unknown name, or `host="pinned"` without a CUDA device.
    """
    make_quantizer(config)
    check_kernel(config.kernel)
    if unknown := set(config.skip_passes) - OPTIONAL:
        raise ConfigError(
            f"skip_passes={sorted(unknown)}: {', '.join(sorted(OPTIONAL))} can be left out, and no other pass."
        )
    if config.host == "pinned":
        resolve_host(config.host, torch.device("cuda"))


class Backend:
    """The backend of `torch.compile(model, backend="specache")`, called once a graph."""

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | SpecacheConfig | None = None,
        mode: str | None = None,
        observe: Observer | None = None,
    ) -> Compiled:
        """Compile one graph of Dynamo's.

        Under `torch._dynamo.config.suppress_errors` an error here would be swallowed, and the model run uncompiled: a
        refusal is raised by the runner that is returned then.

        Args:
            gm: The graph. It is copied, never edited.
            example_inputs: Its inputs.
            options: See `SpecacheConfig`.
            mode: Not supported: Inductor's modes don't apply.
            observe: Sees every graph on the way (`specache_fx.explain`).

        Raises:
            ConfigError: On a mode, an unknown option, a bad value or a `host_dir` that can't be used.
            UnsupportedGraphError: Under `strict=True`, if an attention can't be rewritten.
        """
        try:
            if mode is not None:
                raise ConfigError(
                    f'mode={mode!r} is not supported by backend="specache": its options are set with options={{...}}.'
                    f" Valid options: {', '.join(SpecacheConfig.__dataclass_fields__)}."
                )
            config = SpecacheConfig.from_options(options).for_device(device_kind(gm.graph))
            check_names(config)
            return _Compile(gm, example_inputs, config, observe).run()
        except SpecacheError as error:
            if not torch._dynamo.config.suppress_errors:
                raise
            refusal = error.with_traceback(None)

            def refused(*_: Any) -> Any:
                raise refusal

            return refused

    def compile_step(self, gm: GraphModule, config: SpecacheConfig, values: Values) -> Compiled | None:
        """Compile a decode step that was traced without Dynamo.

        Args:
            gm: Its functional graph.
            config: Options.
            values: See `Program`.

        Returns:
            Its runner; None where not all of its attention is rewritten.
        """
        if buffer_reads(masks_alone_as_sdpa(gm)):
            return None
        program = analyse(gm, config.for_device(device_kind(gm.graph)))
        if program.phase is not Phase.DECODE or program.refusals:
            return None
        return bind(gm, replace(program, values=values))

    def given_up(self, frame: Any, error: Exception, options: Any) -> str | None:
        """Say that Dynamo skips a frame with attention over a cache: `dynamo_hooks` calls this.

        Returns:
            The message; None of another frame.

        Raises:
            UnsupportedGraphError: Under `strict=True`, or if Dynamo compiles the frame's code no more.
        """
        message = graph_breaks.given_up(frame, error)
        _say(message, SpecacheConfig.from_options(options))
        return message

    def reset(self) -> None:
        """Called by `torch.compiler.reset()`."""
        reset()


class _Compile:
    """The compile of one graph of Dynamo's. `LeaveAlone` ends each of its steps for a graph that is not rewritten."""

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        config: SpecacheConfig,
        observe: Observer | None,
    ) -> None:
        self._gm, self._inputs, self._config = gm, example_inputs, config
        self._observe: Observer = observe or (lambda name, graph, program: None)
        self._piece = graph_breaks.around(gm)
        self._values: tuple[Values | None, dict[int, tuple[str, str]]] = {}, {}
        self._refused: tuple[Refusal, ...] = ()
        self._writes = False  # tokens into a tensor that the model keeps

    def run(self) -> Compiled:
        """The runner of the graph."""
        uncompiled = self._piece.uncompiled
        _say(uncompiled, self._config)
        self._observe("dynamo", self._gm, Program(self._config, left_alone=uncompiled))
        try:
            graph = self._functional()
            reads = buffer_reads(graph)
            self._writes = bool(reads) or writes_tokens(graph)
            runner = self._with_buffers(graph, reads) if reads else self._with_appends(graph)
        except LeaveAlone as no:
            return self._leave(no)
        return runner if len(flatten(self._inputs)) == len(self._inputs) else UnwrapSubclasses(runner)

    def _functional(self) -> GraphModule:
        """The graph as functional ATen."""
        if needs_gradients(self._gm):
            remedy = "specache is for inference. Call the model under torch.no_grad() (model.generate() does)"
            raise LeaveAlone("gradients are enabled", remedy)
        if fake_mode_of(value_of(node) for node in placeholders(self._gm.graph)) is None:
            raise LeaveAlone("It takes no tensors: neither tokens nor a cache.", "")
        try:
            graph = masks_alone_as_sdpa(trace(self._gm))
        except TraceError as error:
            raise LeaveAlone(str(error), "Move that operation out of the compiled module") from error
        self._values = values_behind(placeholders(graph.graph))
        return graph

    def _analysed(self, graph: GraphModule, positions: Collection[int] = ()) -> Program:
        """The findings on a functional graph, which gets into normal form."""
        values, floats = self._values
        program = graph_breaks.named(analyse(graph, self._config, positions), self._piece)
        program = replace(program, values=values, floats=floats)
        self._observe("analyse", graph, program)
        return program

    def _with_appends(self, graph: GraphModule) -> Compiled:
        """The runner of a graph that returns its caches with the new tokens appended."""
        program = self._analysed(graph)
        self._refused = program.refusals
        program = trace_as_growing(program, placeholders(graph.graph))
        self._report(program)
        devices = sorted({str(value_of(site.keys.new).device) for site in program.sites})
        if len(devices) > 1:
            reason = f"its KV caches are on {len(devices)} devices ({', '.join(devices)})"
            remedy = "a session lives on one. Load the model on one device, as with device_map={'': 0}"
            raise LeaveAlone(reason, remedy)
        if program.phase is Phase.NO_CACHE:
            found = self._piece.found
            if self._writes and not program.refusals:
                remedy = f"{CACHE_SO}. Write each call's tokens at once. {LEAVE}."
                raise LeaveAlone(
                    f"its caches are written in place, and {reader_of(mutated_inputs(graph.graph), 'them')}",
                    remedy if found is None else f"{found}. {found.remedy}",
                )
            raise LeaveAlone("" if found is None else f"This graph is a piece. {found}. {found.remedy}", "")
        return bind(graph, program, self._observe)

    def _with_buffers(self, graph: GraphModule, reads: Sequence[BufferRead]) -> Compiled:
        """The runner of a graph that writes its caches in place."""
        if all(side.window is not None for read in reads for side in read.sides):
            newest = "its caches keep the newest tokens alone, in buffers of fixed length"
            raise LeaveAlone(newest, f"they don't grow. {GROWING}")
        context = TracingContext.try_get()

        def make_later(has_past: bool) -> Growing:
            with compiling(), tracing(context):
                try:
                    return self._grown(graph, reads, has_past)
                except LeaveAlone as no:
                    return self._leave(no), None

        follows = has_past(reads)
        runner, plan = self._grown(graph, reads, follows)
        if plan is not None and plan.is_step:  # within Dynamo's trace, which may start over
            trace_as_growing(Program(self._config, kv_lens=plan.rows), ())
        return FixedCacheRunner(make_later, follows, (runner, plan))

    def _grown(self, graph: GraphModule, reads: Sequence[BufferRead], has_past: bool) -> Growing:
        """The runner of calls with a past, or of those without, with caches that grow in place of buffers."""
        graph, plan = grow(graph, reads, has_past=has_past)
        program = self._analysed(graph, plan.starts)
        buffers = {buffer.input for buffer in plan.buffers}
        program = replace(
            program, weights={i: name for i, name in program.weights.items() if i not in buffers}
        )
        if program.refusals:
            first = program.refusals[0]
            raise LeaveAlone(f"its caches are written in place, and {first.message}", first.remedy)
        if 2 * len(program.owners) != len(plan.buffers):
            _, unknown = attention_cores(graph)
            softmax, reason = next(iter(unknown.items()), (None, "not all of them are read by attention"))
            remedy = LEAVE if softmax is None else sdpa_instead(softmax)
            raise LeaveAlone(f"its caches are written in place, and {reason}", remedy)
        if not plan.is_step and self._config.lowering == "inductor":  # fused, no mask is kept
            roots = [value_of(node) for node in placeholders(plan.shown.graph.graph)]
            lowered = lower(plan.shown.graph, roots, self._config.lowering)
            plan = replace(plan, shown=plan.shown._replace(graph=lowered))
        return bind(graph, program, self._observe), plan

    def _report(self, program: Program) -> None:
        """Name the attentions that are left alone."""
        if program.refusals and program.config.strict:
            raise UnsupportedGraphError(" ".join(merged_messages(program.refusals)))
        for message in merged_messages(program.refusals):
            # Graphs of one model differ in the names of nodes, and in which sizes are constants.
            warn_once(logger, f"specache: {message}", key=re.sub(r"`[^`]*`|\[[\d, ?]*\]", "", message))
        logger.info(
            "%s: %d attentions rewritten, %d left alone",
            program.phase.value,
            len(program.sites),
            len(program.refusals),
        )

    def _leave(self, no: LeaveAlone) -> Compiled:
        """Run the graph as the model wrote it, and say why where it has a cache: the one way out.

        Raises:
            UnsupportedGraphError: Under `strict=True`, in place of a warning.
        """
        message = no.reason or None
        if no.remedy:
            message = f"specache leaves this model as it is, because {no.reason}: {no.remedy.rstrip('.')}."
            if self._writes or may_have_cache(self._gm):
                _say(message, self._config, prefix="")
        kv = tuple(kv_inputs(self._gm))
        program = Program(self._config, refusals=self._refused, other_kv_inputs=kv, left_alone=message)
        self._observe("leave_alone", self._gm, program)
        # Dynamo makes a graph for the layout of handles, which runs once: the cache that it returns is of numbers.
        once = any(isinstance(each, torch.Tensor) and is_laid_out(each) for each in self._inputs)
        given = placeholders(self._gm.graph)
        sizes = frozenset(i for i, node in enumerate(given) if all(map(reads_shape_only, node.users)))
        return LeftAlone(
            lower(self._gm, self._inputs, "eager" if once else self._config.lowering), program, sizes
        )


def bind(gm: GraphModule, program: Program, observe: Observer | None = None) -> Compiled:
    """Rewrite a graph by `BINDING_PASSES`, and make its runner.

    Args:
        gm: The graph in normal form; edited in place.
        program: The findings on it, attentions that can be rewritten among them.
        observe: Sees the graph after each pass.
    """
    inputs = [value_of(node) for node in placeholders(gm.graph)]
    gm = run_passes(gm, program, BINDING_PASSES[program.phase], observe)
    graph_breaks.note_rewritten(program)
    config, kv = program.config, value_of(program.sites[0].keys.new)
    choose_kernel(config.kernel, kv.device)
    check_forms(config.kernel, [layer_form(program, site, config.num_lanes) for site in program.sites])
    tiered = {site.layer for site in program.sites if site.keys.window is None}
    if tiered and len(tiered) <= config.resident_layers:
        warn_once(
            logger,
            f"specache: resident_layers={config.resident_layers} keeps each of the {len(tiered)} layers that hold"
            " all tokens whole on the device: nothing is quantised or offloaded. Give a smaller number.",
        )
    runner: Compiled
    if program.phase is Phase.DECODE:
        runner = Decode(gm, program, observe)
    else:
        is_prompt = program.phase is Phase.PREFILL
        if is_prompt and config.placement.offload:  # where sessions are made
            check_host_dir(config.host, config.host_dir)
        inputs = [*inputs, example_state(len(program.owners))]
        compiled = lower_prompt(gm, inputs, program, "the prompt" if is_prompt else "the next turn")
        runner = Prefill(compiled, program, kv.dtype, kv.device) if is_prompt else Extend(compiled, program)
    return AtBorder(runner, program) if program.output_forms or program.newest_inputs else runner


def _say(message: str | None, config: SpecacheConfig, prefix: str = "specache: ") -> None:
    """Warn that attention over a cache is not rewritten.

    Raises:
        UnsupportedGraphError: Under `strict=True`.
    """
    if message is not None and config.strict:
        raise UnsupportedGraphError(message)
    if message is not None:
        warn_once(logger, f"{prefix}{message}")


dynamo_hooks.install()
specache = Backend()

"""The `torch.compile` backend: from Dynamo's graph to a runner."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from specache_fx import background, direct_step, dynamo_hooks, graph_breaks
from specache_fx._log import forget_warnings, warn_once
from specache_fx.border import AtBorder, UnwrapSubclasses, as_taken
from specache_fx.capture.analyse import analyse, kv_inputs
from specache_fx.capture.buffer_writes import writes_tokens
from specache_fx.capture.buffers_heads_first import BufferForm, buffers_heads_first
from specache_fx.capture.cache_side import GROWING, LEAVE, LeaveAlone
from specache_fx.capture.dynamo_graph import needs_gradients
from specache_fx.capture.fixed_caches import attends_in_place, grow, has_past, keeps_windows_alone
from specache_fx.capture.flex_attention import with_masks_alone
from specache_fx.capture.graph_edit import fake_mode_of
from specache_fx.capture.graph_slices import mutated_inputs
from specache_fx.capture.graph_utils import (
    device_kind,
    is_float,
    placeholders,
    reads_shape_only,
    shape_of,
    value_of,
)
from specache_fx.capture.program import Phase, Program, merged_messages
from specache_fx.capture.subclasses import flatten
from specache_fx.capture.trace import GROWS, TraceError, trace
from specache_fx.capture.unknown_forms import CACHE_SO, reader_of
from specache_fx.config import SpecacheConfig
from specache_fx.decode_runner import Decode
from specache_fx.errors import ConfigError, SpecacheError, UnsupportedGraphError
from specache_fx.fixed_runner import FixedCacheRunner, Growing
from specache_fx.lowering import Compiled, example_state, lower, lower_prompt
from specache_fx.passes.pipeline import BINDING_PASSES, OPTIONAL, Observer, run_passes
from specache_fx.recompile_limit import make_room
from specache_fx.retrace import trace_as_growing
from specache_fx.runners import Extend, LeftAlone, Prefill, Refused, compiling
from specache_fx.runtime.handle_form import is_laid_out
from specache_fx.runtime.host_blocks import check_host_dir, resolve_host
from specache_fx.runtime.kernels import LayerForm, check_forms, check_kernel, choose_kernel
from specache_fx.runtime.quant import make_quantizer
from specache_fx.traced_values import Values, traced

logger = logging.getLogger(__name__)
_GROWING_BUFFERS = (
    "specache: the model keeps a growing KV cache in buffers of its own (register_buffer). Dynamo takes the sizes of"
    " buffers for constants, and compiles the step anew for each token. Set"
    " torch._dynamo.config.force_parameter_static_shapes = False before the first call, or keep the cache in plain"
    " attributes. If a module counts its tokens in an int, set"
    " torch._dynamo.config.allow_unspec_int_on_nn_module = True too."
)


def _unread(gm: GraphModule, found: graph_breaks.Break | None) -> LeaveAlone:
    """Why caches that a graph writes in place are left alone, where it has no attention over them."""
    remedy = (
        f"{CACHE_SO}. Write each call's tokens at once. {LEAVE}."
        if found is None
        else f"{found}. {found.remedy}"
    )
    return LeaveAlone(
        f"its caches are written in place, and {reader_of(mutated_inputs(gm.graph), 'them')}", remedy
    )


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
        refusal is raised by what is returned then.

        Args:
            gm: The graph. It is copied, never edited.
            example_inputs: Its inputs.
            options: See `SpecacheConfig`.
            mode: Not supported: Inductor's modes don't apply.
            observe: Sees every graph on the way (`specache_fx.explain`).

        Raises:
            ConfigError: On a mode, an unknown option, a bad value or a `host_dir` that can't be used.
            UnsupportedGraphError: Under `strict=True`, if an attention can't be rewritten; or if Dynamo is about to
                give this model up (see `make_room`).
        """
        try:
            if mode is not None:
                raise ConfigError(
                    f'mode={mode!r} is not supported by backend="specache": its options are set with options={{...}}.'
                    f" Valid options: {', '.join(SpecacheConfig.__dataclass_fields__)}."
                )
            return self._compile(gm, example_inputs, options, observe)
        except SpecacheError as error:
            if not torch._dynamo.config.suppress_errors:
                raise
            return Refused(error)

    def _compile(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        options: Mapping[str, Any] | SpecacheConfig | None,
        observe: Observer | None,
    ) -> Compiled:
        config = SpecacheConfig.from_options(options).for_device(device_kind(gm.graph))
        check_names(config)
        make_room()
        piece = graph_breaks.around(gm)
        found, uncompiled = piece.found, piece.uncompiled
        _say(uncompiled, config)
        program = Program(config)
        if observe is not None:
            observe("dynamo", gm, replace(program, left_alone=uncompiled))
        if needs_gradients(gm):
            remedy = "specache is for inference. Call the model under torch.no_grad() (model.generate() does)"
            return self._without_cache(gm, example_inputs, program, observe, "gradients are enabled", remedy)
        if fake_mode_of(value_of(node) for node in placeholders(gm.graph)) is None:
            return self._left_alone(
                gm, example_inputs, program
            )  # it takes no tensors: neither tokens nor a cache
        try:
            rewritten = trace(gm)
        except TraceError as error:
            remedy = "Move that operation out of the compiled module"
            return self._without_cache(gm, example_inputs, program, observe, str(error), remedy)
        plain, forms = buffers_heads_first(with_masks_alone(rewritten))
        if attends_in_place(plain):
            try:
                return self._in_place(gm, plain, forms, example_inputs, config, observe, piece)
            except LeaveAlone as no:
                return self._left_in_place(gm, example_inputs, program, observe, no)
        if keeps_windows_alone(rewritten):
            bounded = LeaveAlone(
                "its caches keep the newest tokens alone, in buffers of fixed length",
                f"they don't grow. {GROWING}",
            )
            return self._left_in_place(gm, example_inputs, program, observe, bounded)
        inputs, writes = placeholders(rewritten.graph), writes_tokens(rewritten)
        values, floats = traced(inputs)
        program = replace(graph_breaks.named(analyse(rewritten, config), piece), values=values, floats=floats)
        inputs = placeholders(rewritten.graph)  # Dynamo's, and those that were added
        if observe is not None:
            observe("analyse", rewritten, program)
        rewritten = run_passes(rewritten, program, BINDING_PASSES, observe)
        program = trace_as_growing(inputs, program)
        self._report(program)
        grows = program.phase is Phase.DECODE and any(inputs[i].meta.get(GROWS) for i in program.past_inputs)
        if grows and torch._dynamo.config.force_parameter_static_shapes:
            warn_once(logger, _GROWING_BUFFERS)
        devices = sorted({str(value_of(site.keys.new).device) for site in program.sites})
        if len(devices) > 1:
            remedy = "a session lives on one. Load the model on one device, as with device_map={'': 0}"
            reason = f"its KV caches are on {len(devices)} devices ({', '.join(devices)})"
            return self._without_cache(gm, example_inputs, program, observe, reason, remedy)
        if program.phase is Phase.NO_CACHE and not program.refusals and writes:
            return self._left_in_place(gm, example_inputs, program, observe, _unread(rewritten, found))
        if program.phase is Phase.NO_CACHE:
            broken = None if found is None else f"This graph is a piece. {found}. {found.remedy}"
            program = replace(program, other_kv_inputs=tuple(kv_inputs(gm)), left_alone=broken)
            if observe is not None and broken is not None:
                observe("leave_alone", gm, program)
            return self._left_alone(gm, example_inputs, program)
        taken = flatten(example_inputs)
        runner = self._runner(rewritten, as_taken(program, taken), program, observe)
        return runner if len(taken) == len(example_inputs) else UnwrapSubclasses(runner)

    def compile_step(self, gm: GraphModule, config: SpecacheConfig, values: Values) -> Compiled | None:
        """Compile a decode step that was traced without Dynamo.

        Args:
            gm: Its functional graph.
            config: Options.
            values: See `Program`.

        Returns:
            Its runner; None where not all of its attention is rewritten.
        """
        config = config.for_device(device_kind(gm.graph))
        plain, _ = buffers_heads_first(with_masks_alone(gm))
        if attends_in_place(plain) or keeps_windows_alone(gm):
            return None
        inputs = [value_of(node) for node in placeholders(gm.graph)]
        program = replace(analyse(gm, config), values=values, floats={})
        rewritten = run_passes(gm, program, BINDING_PASSES, None)
        if program.phase is not Phase.DECODE or program.refusals:
            return None
        return self._runner(rewritten, inputs, program, None)

    def _in_place(
        self,
        gm: GraphModule,
        traced: GraphModule,
        forms: Mapping[int, BufferForm],
        example_inputs: Sequence[Any],
        config: SpecacheConfig,
        observe: Observer | None,
        piece: graph_breaks.Around,
    ) -> Compiled:
        """The runner of a graph that writes its caches in place.

        Raises:
            LeaveAlone: If it is to be left alone.
        """
        context = TracingContext.try_get()

        def make(has_past: bool) -> Growing:
            rewritten, plan = grow(traced, forms, has_past=has_past)
            inner = graph_breaks.named(analyse(rewritten, config, plan.starts + plan.position_inputs), piece)
            examples = [value_of(node) for node in placeholders(rewritten.graph)]  # newest ids are one more
            buffers = {buffer.input for buffer in plan.buffers}
            weights = {i: name for i, name in inner.weights.items() if i not in buffers}
            inner = replace(inner, weights=weights)
            if observe is not None:
                observe("analyse", rewritten, inner)
            rewritten = run_passes(rewritten, inner, BINDING_PASSES, observe)
            if inner.refusals:
                first = inner.refusals[0]
                raise LeaveAlone(f"its caches are written in place, and {first.told}", first.remedy)
            if 2 * len(inner.owners) != len(plan.buffers):
                unread = "its caches are written in place, and not all of them are read by attention"
                raise LeaveAlone(unread, LEAVE)
            if plan.q_len != 1 and config.lowering == "inductor":  # fused, no mask is kept
                assert isinstance(plan.shown, GraphModule)
                roots = [value_of(node) for node in placeholders(plan.shown.graph)]
                plan = replace(plan, shown=lower(plan.shown, roots, config.lowering))
            return self._runner(rewritten, examples, inner, observe), plan

        def make_later(has_past: bool) -> Growing:
            with compiling(), tracing(context):
                try:
                    return make(has_past)
                except LeaveAlone as no:
                    return self._left_in_place(gm, example_inputs, Program(config), observe, no), None

        follows = has_past(traced)
        runner = FixedCacheRunner(make_later, follows, make(follows))
        return runner if len(flatten(example_inputs)) == len(example_inputs) else UnwrapSubclasses(runner)

    def _runner(
        self,
        rewritten: GraphModule,
        example_inputs: Sequence[Any],
        program: Program,
        observe: Observer | None,
    ) -> Compiled:
        """The runner of a graph in which attentions are rewritten."""
        runner = self._inner_runner(rewritten, example_inputs, program, observe)
        moved = program.output_forms or program.newest_inputs
        return AtBorder(runner, program) if moved else runner

    def _inner_runner(
        self,
        rewritten: GraphModule,
        example_inputs: Sequence[Any],
        program: Program,
        observe: Observer | None,
    ) -> Compiled:
        make_room(rewrites=True)
        graph_breaks.note_rewritten(program)
        config = program.config
        kv = value_of(program.sites[0].keys.new)
        choose_kernel(config.kernel, kv.device)
        check_forms(config.kernel, _forms(program))
        tiered = {site.layer for site in program.sites if site.keys.window is None}
        if tiered and len(tiered) <= config.resident_layers:
            warn_once(
                logger,
                f"specache: resident_layers={config.resident_layers} keeps each of the {len(tiered)} layers that hold"
                " all tokens whole on the device: nothing is quantised or offloaded. Give a smaller number.",
            )
        if program.phase is Phase.DECODE:
            return Decode(rewritten, program, observe)
        if program.phase is Phase.PREFILL and config.placement.offload:  # where sessions are made
            check_host_dir(config.host, config.host_dir)
        what = "the prompt" if program.phase is Phase.PREFILL else "the next turn"
        inputs = [*example_inputs, example_state(len(program.owners))]
        compiled = lower_prompt(rewritten, inputs, program, what)
        if program.phase is Phase.PREFILL:
            return Prefill(compiled, program, kv.dtype, kv.device)
        return Extend(compiled, program)

    def given_up(self, frame: Any, error: Exception, options: Any) -> str | None:
        """Say that Dynamo skips a frame with attention over a cache: `dynamo_hooks` calls this.

        Returns:
            What is said; None of another frame.

        Raises:
            UnsupportedGraphError: Under `strict=True`.
        """
        message = graph_breaks.given_up(frame, error)
        _say(message, SpecacheConfig.from_options(options))
        return message

    def reset(self) -> None:
        """Called by `torch.compiler.reset()`."""
        forget_warnings()
        graph_breaks.forget()
        background.forget()
        direct_step.forget()

    def _without_cache(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        program: Program,
        observe: Observer | None,
        reason: str,
        remedy: str,
        *,
        has_cache: bool = False,
    ) -> Compiled:
        message = f"specache leaves this model as it is, because {reason}: {remedy}."
        program = replace(program, other_kv_inputs=tuple(kv_inputs(gm)), left_alone=message)
        if observe is not None:
            observe("leave_alone", gm, program)
        outputs = gm.graph.output_node().all_input_nodes
        has_cache |= any(len(shape_of(out) or ()) == 4 and is_float(out) for out in outputs)
        if has_cache or program.other_kv_inputs:
            if program.config.strict:
                raise UnsupportedGraphError(message)
            warn_once(logger, message)
        return self._left_alone(gm, inputs, program)

    def _left_in_place(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        program: Program,
        observe: Observer | None,
        no: LeaveAlone,
    ) -> Compiled:
        remedy = no.remedy.rstrip(".")
        return self._without_cache(gm, inputs, program, observe, str(no), remedy, has_cache=True)

    def _left_alone(self, gm: GraphModule, inputs: Sequence[Any], program: Program) -> Compiled:
        # Dynamo makes a graph for the layout of handles, which runs once: the cache that it returns is of numbers.
        once = any(isinstance(each, torch.Tensor) and is_laid_out(each) for each in inputs)
        lowering = "eager" if once else program.config.lowering
        given = placeholders(gm.graph)
        sizes = frozenset(i for i, node in enumerate(given) if all(map(reads_shape_only, node.users)))
        return LeftAlone(lower(gm, inputs, lowering), program, sizes)

    def _report(self, program: Program) -> None:
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


def _say(message: str | None, config: SpecacheConfig) -> None:
    """Say that attention runs uncompiled.

    Raises:
        UnsupportedGraphError: Under `strict=True`.
    """
    if message is not None and config.strict:
        raise UnsupportedGraphError(message)
    if message is not None:
        warn_once(logger, f"specache: {message}")


def _forms(program: Program) -> list[LayerForm]:
    """The forms of a graph's attentions that a kernel has to compute, one lane's query a token."""
    config, exact = program.config, program.exact_layers
    quantizer = make_quantizer(config)
    return [
        LayerForm(
            dtypes=frozenset({value_of(site.core.query).dtype, value_of(site.keys.new).dtype}),
            quantizer=None if site.layer in exact else quantizer,
            key_dim=site.key_dim,
            value_dim=site.value_dim,
            lanes=config.num_lanes,
            num_queries=config.num_lanes * (shape_of(site.core.query) or (1, 1))[1] // site.num_kv_heads,
            expands=site.expansion is not None,
            aggregation=config.aggregation,
            cpu_reads=config.cpu_reads and site.layer not in exact,
        )
        for site in program.sites
    ]


dynamo_hooks.install()
specache = Backend()

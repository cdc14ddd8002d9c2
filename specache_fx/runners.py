"""What runs in place of Dynamo's graphs: one runner a phase.

A runner gets Dynamo's inputs and gives Dynamo's outputs. Between the two it finds or makes the session, runs the
compiled graph with the session's `state`, and puts handles where Dynamo expects KV tensors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from specache_fx._log import warn_once
from specache_fx.errors import CacheHandleError, SpecacheError, UnsupportedGraphError
from specache_fx.lowering import Compiled, lower_static
from specache_fx.passes.base import OutputPlan, PassState
from specache_fx.passes.graph_utils import placeholders
from specache_fx.passes.pipeline import Observer, build_decode_graph
from specache_fx.runtime import registry
from specache_fx.runtime.session import LayerShape, Session

logger = logging.getLogger(__name__)


def _shapes(state: PassState) -> tuple[LayerShape, ...]:
    return tuple(
        LayerShape(site.num_kv_heads, site.key_dim, site.value_dim, site.window) for site in state.owners
    )


def _assemble(
    plan: OutputPlan, kept: Sequence[Any], handles: Sequence[torch.Tensor], args: Sequence[Any]
) -> tuple[Any, ...]:
    """Dynamo's outputs from the graph's and the handles."""
    outputs: list[Any] = [None] * plan.total
    for i, value in zip(plan.kept, kept, strict=True):
        outputs[i] = value
    for i, slot in plan.handles.items():
        outputs[i] = handles[slot]
    for i, value in plan.constants.items():
        outputs[i] = value
    if plan.length_graph is not None:
        lengths = plan.length_graph(*(args[i] for i in plan.length_inputs))
        for i, value in zip(plan.lengths, lengths, strict=True):
            outputs[i] = value
    return tuple(outputs)


@contextlib.contextmanager
def _inference() -> Iterator[None]:
    """No gradients, and no inference tensors: a session outlives the mode that its prompt ran in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class LeftAlone:
    """A graph without a rewritten attention. It must never read a handle."""

    def __init__(self, compiled: Compiled, state: PassState) -> None:
        self._compiled, self._state = compiled, state

    def __call__(self, *args: Any) -> Any:
        """Run the graph, unless an input is a handle.

        Raises:
            CacheHandleError: With the reasons why it was left alone.
        """
        for i in self._state.other_kv_inputs:
            _refuse_handle(args[i], self._state)
        return self._compiled(*args)


def _refuse_handle(tensor: torch.Tensor, state: PassState) -> None:
    if registry.is_handle(tensor):
        reasons = " ".join(map(str, state.refusals)) or "The graph has no attention over this cache."
        raise CacheHandleError(
            "A KV cache that is managed by specache reached an attention that specache did not rewrite, and would be"
            f" read as numbers there. {reasons}"
        )


class Prefill:
    """Makes a session for every prompt."""

    def __init__(
        self, compiled: Compiled, state: PassState, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._compiled, self._state, self._dtype, self._device = compiled, state, dtype, device
        assert state.outputs is not None
        self._plan = state.outputs

    def __call__(self, *args: Any) -> Any:
        """Run the prompt; the graph stores each layer's pairs on the way."""
        registry.sweep()
        with _inference():
            session = registry.open_session(
                self._state.config, _shapes(self._state), self._dtype, self._device
            )
            try:
                kept = self._compiled(*args, session.state)
                session.advance(session.layers[0].kv_len, decoded=False)
                handles = registry.issue(session)
            except BaseException:
                session.close()  # nothing was handed out: give the memory back at once
                raise
            return _assemble(self._plan, kept, handles, args)


def _resolve(
    state: PassState, shapes: tuple[LayerShape, ...], args: Sequence[Any]
) -> tuple[Session, list[torch.Tensor]]:
    claim = registry.resolve([args[i] for i in state.past_inputs])
    session = claim.session
    if session.config != state.config or session.shapes != shapes:
        raise CacheHandleError(
            f"The past KV cache was made with {session.config} for {len(session.shapes)} layers; this graph was"
            f" compiled with {state.config} for {len(shapes)}. Use a cache with the compiled model that made it."
        )
    for i in state.other_kv_inputs:
        _refuse_handle(args[i], state)
    past = registry.take(claim)
    registry.sweep()
    return session, past


class Extend:
    """Continues a session by several tokens at once, exactly."""

    def __init__(self, compiled: Compiled, state: PassState) -> None:
        self._compiled, self._state, self._layers = compiled, state, _shapes(state)
        assert state.outputs is not None
        self._plan = state.outputs

    def __call__(self, *args: Any) -> Any:
        """Run the new tokens on the 16-bit history."""
        with _inference():
            session, past = _resolve(self._state, self._layers, args)
            session.forget_lookahead()
            kept = self._compiled(*args, session.state)
            session.advance(session.layers[0].kv_len - session.kv_len, decoded=False)
            handles = registry.resized(session, past)
            return _assemble(self._plan, kept, handles, args)


class Decode:
    """One token a call; the graph is made and compiled when the first one comes, for its batch size."""

    def __init__(self, gm: GraphModule, state: PassState, observe: Observer | None = None) -> None:
        self._gm, self._state, self._observe = gm, state, observe
        assert state.outputs is not None and state.sources is not None
        self._plan, self._sources, self._layers = state.outputs, state.sources, _shapes(state)
        self._steps: dict[tuple[Any, ...], Compiled] = {}
        self._window_ahead = True  # the last step's lane 1 saw what its token will see
        self._inputs = [
            (node.meta.get("specache_input", -1), node.meta.get("specache_prelude"))
            for node in placeholders(gm.graph)
        ]
        # Where every layer keeps a window nothing is selected, and no speculative token is needed.
        state.lanes = state.config.num_lanes if len(state.window_layers) < len(state.owners) else 1
        if state.mutated is not None:
            # Lanes and pre-decode run what is in the graph for a token that may never come: state would move twice.
            if state.lanes > 1:
                self._fall_back(f"the model updates a state of its own in place (`{state.mutated}`)")
        elif state.lanes > 1 and self._sources.token is None:
            self._fall_back(
                "this graph takes no token ids (a graph break inside the model, or embeddings as input)"
            )
        elif state.lanes > 1 and state.logits is None:
            self._fall_back("this graph returns no logits over its vocabulary")

    def __call__(self, *args: Any) -> Any:
        """Decode one token (Algorithm 3), after Algorithm 2 where a run of them begins."""
        with _inference():
            session, past = _resolve(self._state, self._layers, args)
            lost = self._state.lanes > 1 and session.speculative_token is None
            if session.staged_for != session.kv_len or lost:
                self._begin(session, args)
            else:
                check_masks(session, self._state, args, ahead=not session.kv_len % session.config.group_size)
            kept = self._step(session, args, ahead=1)
            session.advance(1, decoded=True)
            if self._state.lanes > 1 and not (self._sources.knows_next and self._window_ahead):
                session.staged_for = None  # lane 1 had no position of its own: start over with the next token
            handles = registry.resized(session, past)
            return _assemble(self._plan, kept, handles, args)

    def _begin(self, session: Session, args: Sequence[Any]) -> None:
        """Before a run of decode steps: check the masks, then pre-decode (Algorithm 2)."""
        check_masks(session, self._state, args, ahead=True)
        session.forget_lookahead()
        config = self._state.config
        if (
            self._state.mutated is None
            and session.has_global_layers
            and config.placement.prefetch
            and config.lookahead != "none"
        ):
            session.predecoding = True
            try:
                self._step(session, args, ahead=0)
            finally:
                session.predecoding = False

    def _step(self, session: Session, args: Sequence[Any], ahead: int) -> Sequence[Any]:
        """Run the graph once and return lane 0's outputs.

        Args:
            session: The session.
            args: Dynamo's inputs.
            ahead: Tokens from lane 0 to lane 1: 1 in a decode step. In pre-decode 0, both lanes are the first token.
        """
        token = None if self._sources.token is None else args[self._sources.token]
        if ahead and token is not None and session.guessed_token is not None:
            session.metrics.count_token(token, session.guessed_token)
        speculative = session.speculative_token if ahead else token
        inputs = self._bind(args, speculative, ahead)
        key = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs)
        if key not in self._steps:
            step = self._compile(inputs, session)
            if step is None:  # lanes are not to be had, and were just given up
                return self._step(session, args, ahead)
            self._steps[key] = step
        session.begin_step(self._window_masks(session, args, ahead))
        results = self._steps[key](*(x for x in inputs if isinstance(x, torch.Tensor)), session.state)
        if self._state.lanes == 1:
            session.speculative_token = session.guessed_token = None
            return list(results)
        assert token is not None and self._state.logits is not None
        session.guessed_token = speculative if ahead else None
        logits = results[self._state.logits][1]
        session.speculative_token = logits.argmax(-1).reshape(token.shape).to(token.dtype)
        return [result[0] for result in results]

    def _window_masks(
        self, session: Session, args: Sequence[Any], ahead: int
    ) -> dict[int, tuple[torch.Tensor | None, ...]]:
        """What the model's own masks let each lane see of the layers that keep a window."""
        windows, lanes = self._state.window_masks, self._state.lanes
        self._window_ahead = True
        if windows is None:
            return {}
        masks = windows.seen(session, args, 0)
        assert masks is not None
        if lanes == 1:
            return {layer: (mask,) for layer, mask in masks.items()}
        following = windows.seen(session, args, ahead) if ahead else masks
        self._window_ahead = following is not None
        # Without a mask of its own lane 1 guesses; what it selects is not used.
        return {
            layer: (mask, None if following is None else following[layer]) for layer, mask in masks.items()
        }

    def _bind(self, args: Sequence[Any], speculative: torch.Tensor | None, ahead: int) -> list[Any]:
        """The graph's inputs, those that differ from lane to lane stacked."""
        prelude, lanes = self._state.prelude, self._state.lanes
        boundary = prelude(args, 0) if prelude is not None else ()
        if lanes > 1:
            following = prelude.following(args, ahead, boundary) if prelude is not None else ()
            boundary = tuple(torch.stack(pair) for pair in zip(boundary, following, strict=True))
        inputs: list[Any] = []
        for index, cut in self._inputs:
            if cut is not None:
                inputs.append(boundary[cut])
            elif lanes > 1 and index == self._sources.token:
                assert speculative is not None
                inputs.append(torch.stack([args[index], speculative]))
            else:
                inputs.append(args[index])
        return inputs

    def _compile(self, inputs: list[Any], session: Session) -> Compiled | None:
        try:
            graph = build_decode_graph(self._gm, self._state, inputs, self._observe)
        except SpecacheError:
            raise
        except Exception as error:
            if self._state.lanes == 1:
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            self._fall_back(f"the graph can't be traced for two tokens at once: {reason}")
            return None
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        return lower_static(graph, [*tensors, session.state], self._state.config.lowering)

    def _fall_back(self, reason: str) -> None:
        self._state.lanes, self._state.fallback = 1, reason
        warn_once(
            logger,
            f'lookahead="token" is not possible here, "query" is used instead: {reason}. specache_fx.explain() shows'
            " the graph.",
        )


def check_masks(session: Session, state: PassState, args: Sequence[Any], ahead: bool) -> None:
    """Make sure that what the model's masks would hide is just the padding, now and for a group of tokens to come.

    The decode graph has no masks: it hides what the prompt's mask called padding and nothing else. A mask that hides
    more (a sliding window, a mask that the caller changed) or less must not be dropped silently.

    Args:
        session: The session.
        state: What the passes found.
        args: Dynamo's inputs.
        ahead: Look a group of tokens ahead as well: at the start and whenever a group fills.

    Raises:
        UnsupportedGraphError: Names the attention.
    """
    sources = state.sources
    assert sources is not None
    site = next((site for site in state.sites if site.mask is None and site.window is None), None)
    if site is not None and session.key_mask is not None:
        raise UnsupportedGraphError(
            f"The prompt had padding, but attention `{site.node.name}` ({site.source}) has no mask in this step and"
            " would attend to it. Pass the prompt's attention_mask, extended by ones, in every step."
        )
    horizons = (0, session.config.group_size) if ahead and sources.knows_next else (0,)
    for num_tokens in horizons:
        real = session.key_mask
        if real is not None:
            missing = session.kv_len + 1 + num_tokens - real.shape[1]
            real = torch.nn.functional.pad(real, (0, missing), value=True)
        for mask in sources.masks_at(args, num_tokens):
            seen = session.real_keys(mask)
            if seen is real or (seen is not None and real is not None and torch.equal(seen, real)):
                continue
            site = next(site for site in state.sites if site.mask is not None and site.window is None)
            when = f"{num_tokens} tokens from now" if num_tokens else "now"
            raise UnsupportedGraphError(
                f"The mask of attention `{site.node.name}` ({site.source}) hides other keys than the prompt's padding"
                f" ({when}): a sliding window, or an attention_mask that changed after the prompt. Keep the"
                ' attention_mask as it was, extended by ones, or compile this model with backend="inductor".'
            )

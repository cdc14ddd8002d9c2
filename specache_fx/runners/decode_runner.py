"""The runner of decode graphs: one output token a call, and where there are two lanes a speculative one beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from specache_fx._log import warn_once
from specache_fx.capture.program import Program
from specache_fx.errors import SpecacheError, UnsupportedGraphError, first_line
from specache_fx.lowering import Compiled, fused_layers, lower_static
from specache_fx.passes.fuse_layer_steps import is_whole, whole_layers
from specache_fx.passes.pipeline import Observer, build_decode_graph
from specache_fx.report.progress import announced
from specache_fx.runners.base import GoesOn, compiling, note_graph
from specache_fx.runners.graph_inputs import GraphInputs, WindowMasks
from specache_fx.runners.step_masks import StepMasks, read_masks, read_windows
from specache_fx.runtime.native import openmp_spins
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.session.next_answer import LaneCall, NextAnswer
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.steps.device_steps import DeviceSteps
from specache_fx.runtime.tracing import is_recording, span

logger = logging.getLogger(__name__)

_MANY_GRAPHS = 8
_aten = torch.ops.aten


class DecodeGraph(NamedTuple):
    """A decode graph of one shape of its inputs.

    Attributes:
        compiled: Runs it.
        fused_layers: Layers that one operator steps.
        tensors: Which of its inputs are tensors.
        moving: Which of the tensors may lie elsewhere in each call: no weights.
        is_capturable: Each step launches the same, as far as the graph tells.
    """

    compiled: Compiled
    fused_layers: tuple[int, ...]
    tensors: tuple[int, ...]
    moving: tuple[int, ...]
    is_capturable: bool


def _whole_kernel(session: Session) -> str | None:
    """Key of this session's one-operator steps."""
    return None if session.steps is None else session.steps.kernel


def _replays(graph: GraphModule, session: Session) -> bool:
    """Whether the graph's steps will be replayed, if they can be captured. On the CPU all products have to be ours."""
    if session.graph is None or not session.graph.records:
        return False
    others = (
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        _aten.scaled_dot_product_attention.default,  # has products
    )
    return session.device.type != "cpu" or not any(node.target in others for node in graph.graph.nodes)


def _copied(result: Any) -> Any:
    """The caller's own: the next replay overwrites a graph's results, and a view keeps the other lane's."""
    if not isinstance(result, torch.Tensor):
        return result
    # OpenMP's threads copy 32,768 elements or more. Beside other processes one of them waits for a core: 6 ms. Here an
    # element has eight bytes.
    has_words = result.nbytes % 8 == 0 and result.storage_offset() * result.itemsize % 8 == 0
    if result.device.type == "cpu" and result.is_contiguous() and has_words and result.dim():
        return result.flatten().view(torch.int64).clone().view(result.dtype).view(result.shape)
    return result.clone()


class Decode(GoesOn):
    """One token a call; the graph is made and compiled when the first one comes, for its batch size.

    Attributes:
        lanes: Tokens that a step computes at once.
        fallback: Why that is one though two were asked for.
    """

    def __init__(self, gm: GraphModule, program: Program, observe: Observer | None = None) -> None:
        super().__init__(program)
        assert program.decoding is not None
        self._gm, self._observe = gm, observe
        self._decoding, self._sources = program.decoding, program.decoding.sources
        self._graphs: dict[tuple[Any, ...], DecodeGraph] = {}
        self._inputs = GraphInputs(gm, program)
        # Where every layer is exact nothing is selected, and no speculative token is needed.
        self.lanes = program.config.num_lanes if len(program.exact_layers) < len(program.owners) else 1
        self.fallback: str | None = None
        if self.lanes > 1 and (reason := program.decoding.single_lane) is not None:
            self._fall_back(reason)

    def __call__(self, *args: Any) -> Any:
        """Decode one token."""
        openmp_spins.look()
        return super().__call__(*args)

    def _run(self, session: Session, args: Sequence[Any]) -> Sequence[Any]:
        """Decode one token (Algorithm 3), after Algorithm 2 where a run of them begins."""
        if not self._is_noted(session, args):
            note_graph(session, self._program, args)
        session.metrics.begin_step()
        token = self._token(args)
        session.remember(None if token is None else token.reshape(-1, 1))
        kept, goes_on = self._decode(session, args)
        session.advance(1, decoded=True)
        if self.lanes > 1 and not goes_on:
            session.forget_lookahead()
        return kept

    def _token(self, args: Sequence[Any]) -> torch.Tensor | None:
        """The output token's ids, `[batch, 1]`."""
        return None if self._program.token is None else args[self._program.token]

    def _windows(self, session: Session, args: Sequence[Any], lanes: int, ahead: int) -> WindowMasks:
        return read_windows(session, self._decoding.window_masks, args, lanes, ahead)

    def _is_noted(self, session: Session, args: Sequence[Any]) -> bool:
        """Whether the session has gone through this graph with this model: one weight tells, all take too long."""
        program = self._program
        if program.floats or not program.weights:
            return False
        place, name = next(iter(program.weights.items()))
        return session.origin.knows(program.values, name, args[place])

    def _decode(self, session: Session, args: Sequence[Any]) -> tuple[list[Any], bool]:
        """The output token's results, and whether lookahead goes on: lane 1 had a position, and masks, of its own."""
        shares = None
        answer, session.next_answer = session.next_answer, None
        lost = self.lanes > 1 and session.speculative_token is None
        if session.staged_for != session.kv_len or lost:
            masks = self._begin(session, args)
        else:
            fills = self._fills_group(session)
            masks = read_masks(session, self._program, args, ahead=fills, compare=self._accepts)
            if masks.shows_padding:
                masks = self._begin(session, args)
            elif answer is not None and not fills and self._is_right(session, args, masks, answer):
                return self._accept(session, answer), True
            else:
                shares = self._check_guess(session, args, masks)
        kept, windows_known = self._step(session, args, masks, ahead=1, shares=shares)
        knows = self._sources.knows_next and session.kv_len not in self._decoding.fixed_lengths
        return kept, knows and windows_known and not (self._sources.fixed_length and session.masks_move)

    @property
    def _accepts(self) -> bool:
        return self._program.config.accept_guesses and self.lanes > 1

    def _is_right(self, session: Session, args: Sequence[Any], masks: StepMasks, answer: NextAnswer) -> bool:
        """Whether the step before has computed this call's outputs: its token was guessed, and nothing differs."""
        token = self._token(args)
        assert token is not None and session.guessed_token is not None
        if bool((token != session.guessed_token).any()) or not masks.hides_padding:
            return False
        inputs = self._inputs.bind(args, None, 1, 0)
        call = self._inputs.of_lane(args, inputs, self._windows(session, args, 1, 0), 0)
        return call is not None and answer.answers(call)

    def _accept(self, session: Session, answer: NextAnswer) -> list[Any]:
        """Count lane 1's pairs, and return its outputs."""
        assert session.batch is not None and session.guessed_token is not None
        for layer in session.layers:
            layer.was_appended()
        session.metrics.count_accepted(session.batch)
        # No lane has run for the token that follows. It is looked up when it is known (`_check_guess`).
        session.speculative_token = self._best(answer.results, session.guessed_token)
        session.guessed_token = None
        return [result.clone() for result in answer.results]

    @staticmethod
    def _warn_of_no_answers(reason: str) -> None:
        warn_once(
            logger,
            f"accept_guesses=True returns nothing here: {reason}. Each token takes a step, as without the option.",
        )

    def _best(self, results: Sequence[Any], token: torch.Tensor) -> torch.Tensor:
        """The tokens of a lane's largest logits, as `token` is."""
        assert self._decoding.logits is not None
        logits = results[self._decoding.logits]
        if logits.device.type == "cpu":
            logits = logits.float()  # a maximum of 16 bits takes three times as long
        return logits.argmax(-1).reshape(token.shape).to(token.dtype)

    @staticmethod
    def _fills_group(session: Session) -> bool:
        """Whether the window gives a group to the codes in this step: true once in `group_size` steps."""
        config = session.config
        return not (session.kv_len + 1 - config.residual_length) % config.group_size

    def _begin(self, session: Session, args: Sequence[Any]) -> StepMasks:
        """Before a run of decode steps: check the masks, then pre-decode (Algorithm 2). Returns the masks."""
        masks = read_masks(session, self._program, args, ahead=True)
        session.forget_lookahead()
        config = self._program.config
        if (
            self._decoding.is_pure
            and session.has_tiered_layers
            and config.stages
            and config.lookahead != "none"
        ):
            self._step(session, args, masks, ahead=0)
        return masks

    def _check_guess(self, session: Session, args: Sequence[Any], masks: StepMasks) -> torch.Tensor | None:
        """Compare the token with the speculative one, and act on a miss as `on_miss` says.

        A batch row's result depends on no other row. Returns `DecodeStep.shares`.
        """
        token = self._token(args)
        if token is None or session.speculative_token is None:
            return None
        if session.guessed_token is None:  # behind an accepted step: no lane ran for this token
            missed = torch.ones_like(token, dtype=torch.bool)
        else:
            missed = token != session.guessed_token
            session.metrics.count_token(missed.reshape(-1))
        if self._program.config.on_miss == "recover":
            return session.recover(token, missed)
        if self._program.config.on_miss == "refetch":
            self._refetch(session, args, masks, missed)
        return None

    def _refetch(self, session: Session, args: Sequence[Any], masks: StepMasks, missed: torch.Tensor) -> None:
        """Choose and speculate anew for the batch rows that missed. To know whether one did, the host waits."""
        if not bool(missed.any()):
            return
        kept = session.speculative_token
        self._step(session, args, masks, ahead=0, missed=missed.reshape(-1))
        session.metrics.count_refetch()
        if session.speculative_token is not None and kept is not None:
            session.speculative_token = torch.where(missed, session.speculative_token, kept)

    def _step(
        self,
        session: Session,
        args: Sequence[Any],
        masks: StepMasks,
        ahead: int,
        missed: torch.Tensor | None = None,
        shares: torch.Tensor | None = None,
    ) -> tuple[list[Any], bool]:
        """Run the graph once. Returns lane 0's outputs, and `DecodeStep.windows_known`.

        Args:
            session: The session.
            args: Dynamo's inputs.
            masks: Of the output token.
            ahead: Tokens from lane 0 to lane 1: 1 in a decode step. In pre-decode 0, both lanes are the first token.
            missed: See `DecodeStep`.
            shares: See `DecodeStep`.
        """
        token = self._token(args)
        speculative = session.speculative_token if ahead else token
        lanes = self.lanes
        inputs = self._inputs.bind(args, speculative, lanes, ahead)
        made = self._graph_of(inputs, session, lanes)
        if made is None:
            return self._step(session, args, masks, ahead, missed, shares)
        windows = self._windows(session, args, lanes, ahead)
        writes_next = self._accepts and bool(ahead) and not self._fills_group(session)
        if writes_next and not masks.hides_padding:
            writes_next = False
            self._warn_of_no_answers("a mask hides more than the padding, or adds to the scores")
        step = DecodeStep(
            session,
            predecoding=not ahead,
            lanes=lanes,
            fused_layers=made.fused_layers,
            missed=missed,
            shares=shares,
            biases=masks.biases_of(lanes, ahead),
            seen=masks.seen_by(lanes, ahead),
            window_masks=windows,
            writes_next=writes_next,
            expansions={
                i: site.expansion.bind(args) for i, site in enumerate(self._program.sites) if site.expansion
            },
        )
        name = "decode step" if ahead else "pre-decode"
        with step.running(), span(name, device=session.device, session=session.number, kv_len=session.kv_len):
            results = self._results(made, inputs, session)
        if lanes == 1:
            session.speculative_token = session.guessed_token = None
            return [_copied(each) if made.is_capturable else each for each in results], step.windows_known
        assert token is not None
        session.guessed_token = speculative if ahead else None
        following = [result[1] for result in results]
        session.speculative_token = self._best(following, token)
        if writes_next:
            self._foresee(session, following, self._inputs.of_lane(args, inputs, windows, 1))
        return [_copied(result[0]) for result in results], step.windows_known

    def _foresee(self, session: Session, results: Sequence[Any], call: LaneCall | None) -> None:
        """Keep lane 1's outputs for the call that they answer."""
        if call is not None and any(tensor.is_inference() for tensor in call.given):
            self._warn_of_no_answers("its weights are inference tensors, whose changes don't show")
        elif call is not None:
            session.next_answer = NextAnswer(list(map(_copied, results)), call)

    def _graph_of(self, inputs: list[Any], session: Session, lanes: int) -> DecodeGraph | None:
        """The compiled graph for inputs of these shapes; None where lanes are not to be had, and were just given up."""
        key = (_whole_kernel(session), *self._inputs.shapes(inputs))
        if key not in self._graphs:
            with compiling(), announced("the decode step", self._program.config.lowering, len(self._layers)):
                # Another thread may have made it meanwhile, or given lanes up.
                is_due = lanes == self.lanes and key not in self._graphs
                if is_due and (made := self._compile(inputs, session)) is not None:
                    self._graphs[key] = made
            if len(self._graphs) == _MANY_GRAPHS:
                warn_once(
                    logger,
                    f"A decode graph was compiled for {_MANY_GRAPHS} shapes of its inputs: slow if each step has one of"
                    " its own. specache_fx.explain() shows the graph.",
                )
        return self._graphs.get(key)

    def _compile(self, inputs: list[Any], session: Session) -> DecodeGraph | None:
        program = self._program
        program = replace(program, fused=fused_layers(program, _whole_kernel(session), self.lanes))
        try:
            graph = build_decode_graph(self._gm, program, inputs, self.lanes, self._observe)
        except SpecacheError:
            raise
        except Exception as error:
            if self.lanes == 1:
                raise
            self._fall_back(f"the graph can't be traced for two tokens at once: {first_line(error)}")
            return None
        tensors = tuple(i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor))
        given = [*(inputs[i] for i in tensors), session.state]
        is_capturable = self._decoding.is_pure and is_whole(graph)
        by_layer = is_capturable and _replays(graph, session)
        compiled = lower_static(graph, given, self._program.config.lowering, by_layer=by_layer)
        moving = tuple(place for place, i in enumerate(tensors) if i in self._inputs.varying)
        return DecodeGraph(compiled, whole_layers(graph), tensors, moving, is_capturable)

    def _results(self, made: DecodeGraph, inputs: list[Any], session: Session) -> Sequence[Any]:
        """The graph's results: launched one by one, or captured and replayed."""
        steps, flat = session.steps, [inputs[i] for i in made.tensors]
        captures = made.is_capturable and session.graph is not None and session.graph.records
        if isinstance(steps, DeviceSteps):
            steps.captures = captures = captures and not is_recording()
            captures = captures and steps.is_plain
        if not captures or steps is None or session.graph is None:
            return made.compiled(*flat, session.state)
        return session.graph.run(made.compiled, flat, made.moving, session.state, steps)

    def _fall_back(self, reason: str) -> None:
        config = self._program.config
        if config.strict:
            raise UnsupportedGraphError(
                f'lookahead="token" is not possible here: {reason}. Take lookahead="query", or strict=False'
            )
        self.lanes, self.fallback = 1, reason
        idle = {
            'on_miss="refetch"': config.on_miss == "refetch",
            "accept_guesses=True": config.accept_guesses,
        }
        nothing = "".join(
            f" No token is speculated on then, so {option} has nothing to do."
            for option in idle
            if idle[option]
        )
        warn_once(
            logger,
            f'lookahead="token" is not possible here, "query" is used instead: {reason}.{nothing}'
            " specache_fx.explain() shows the graph.",
        )

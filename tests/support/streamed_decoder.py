"""A small model's decode steps on the simulated GPU of `streams_sim`, run as `DecodeRunner` runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.streams_sim import CUDA, World

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.session import registry  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.session import session as sessions
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.session.session import SHARE_AFTER_HIT, Session
from specache_fx.runtime.steps.device_steps import DeviceSteps
from specache_fx.runtime.steps.step_graph import CudaRecorder, StepGraph
from specache_fx.runtime.transfer import Transfer

BATCH, HEADS, KV_HEADS, DIM, PROMPT = 1, 2, 1, 8, 21
USUAL: dict[str, Any] = {"kernel": "triton", "group_size": 4, "residual_length": 3, "top_k": 3, "reserve": 36}
Kind = Callable[..., Transfer]


def choose(patch: pytest.MonkeyPatch, kind: Kind, synchronous: bool = False) -> None:
    """Have sessions behave as on a GPU, with that transfer."""

    def transfer(*given: Any, **_: Any) -> Transfer:
        made = kind(*given)
        made.synchronous = synchronous
        return made

    patch.setattr(sessions, "choose_transfer", transfer)
    patch.setattr(sessions, "recorder_of", lambda device: CudaRecorder(CUDA))
    patch.setattr(graph_ops, "load", lambda: None)


class Decoder:
    """One session and its model: a few products around each attention.

    Args:
        world: The device.
        lanes: Of a step: 2 where a token is speculated on.
        windows: The first layer keeps a window.
        padding: Of the prompt's tokens, the first ones.
        misses: Each third step's token is not the one that was speculated on, and chooses anew.
        writes: Lane 1's pairs are written too, where no group fills.
        options: Of the session.
    """

    def __init__(
        self,
        world: World,
        lanes: int = 1,
        layers: int = 2,
        windows: bool = False,
        padding: int = 0,
        misses: bool = False,
        writes: bool = False,
        **options: Any,
    ) -> None:
        self.world, self.lanes, self.layers = world, lanes, layers
        self._misses, self._writes = misses, writes
        self.generator = torch.Generator().manual_seed(0)
        shapes = tuple(
            LayerShape(KV_HEADS, DIM, DIM, window=7 if windows and not i else None) for i in range(layers)
        )
        config = SpecacheConfig(**(USUAL | options))
        self.session = Session(config, shapes, torch.float32, torch.device("cpu"))
        self.weights = [self._random(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM) * 0.3 for _ in range(layers)]
        self.outputs: list[torch.Tensor] = []
        self.prompt(PROMPT, padding)
        if config.stages and config.lookahead != "none":
            self.step(predecode=True)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def prompt(self, tokens: int, padding: int = 0) -> None:
        """Several tokens at once."""
        mask = torch.ones(BATCH, 1, tokens, dtype=torch.bool)
        mask[..., :padding] = False
        for layer in range(self.layers):
            pair = (self._random(BATCH, KV_HEADS, tokens, DIM) for _ in range(2))
            self.session.store(layer, *pair, mask if padding else None)
        self.session.advance(tokens, decoded=False)
        self.session.forget_lookahead()

    def _model(self, x: torch.Tensor, *rest: torch.Tensor) -> Sequence[torch.Tensor]:
        *weights, state = rest
        step = self._step
        for layer, weight in enumerate(weights):
            sides = (
                (x @ weight).unflatten(-1, (HEADS + 2 * KV_HEADS, DIM)).split([HEADS, KV_HEADS, KV_HEADS], 2)
            )
            query, key, value = (side.unsqueeze(3) for side in sides)
            if step.fused_layers:
                out = torch.ops.specache.device_step.default(query, key, value, state, layer, 0.3)
            else:
                out = step.by_operators(layer, query, key, value, 0.3)
            x = x + out.flatten(2)
            query.fill_(torch.nan)  # Inductor gives its buffers to others at once
            key.fill_(torch.nan)
            value.fill_(torch.nan)
        return [x]

    def _told(self, predecode: bool) -> dict[str, Any]:
        """What is special in the next step; see `DecodeStep`."""
        told: dict[str, Any] = {}
        if self.lanes == 2 and not predecode:
            told["shares"] = torch.full((BATCH,), SHARE_AFTER_HIT)
            if self._misses and len(self.outputs) % 3 == 2:
                told["missed"] = torch.ones(BATCH, dtype=torch.bool)
            first = next(iter(self.session.tiered.values()))
            filled = [first.num_quantized_at(first.kv_len + ahead) for ahead in (0, 1, 2)]
            told["writes_next"] = self._writes and len(set(filled)) == 1
        return told

    def step(self, predecode: bool = False) -> torch.Tensor:
        """One step; returns the first lane's output."""
        session, lanes = self.session, self.lanes
        steps = session.steps
        x = self._random(lanes, BATCH, HEADS * DIM)
        whole = tuple(range(self.layers)) if steps is not None else ()
        self._step = step = DecodeStep(session, predecode, whole, lanes=lanes, **self._told(predecode))
        captures = session.graph is not None and session.graph.records
        with step.running():
            if isinstance(steps, DeviceSteps):
                steps.captures = captures
                captures = captures and steps.is_plain
            given = [x, *self.weights]
            if captures and steps is not None and isinstance(session.graph, StepGraph):
                (out,) = session.graph.run(self._model, given, (0,), session.state, steps)
            else:
                (out,) = self._model(*given, session.state)
        if not predecode:
            session.advance(1, decoded=True)
        self.outputs.append(out[0].clone())
        return self.outputs[-1]

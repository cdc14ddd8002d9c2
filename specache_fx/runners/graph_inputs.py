"""`GraphInputs`: a decode graph's inputs in a call. Inputs that differ from lane to lane are stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from specache_fx.capture.graph.graph_utils import is_static_input, placeholders, value_of
from specache_fx.capture.program import Program
from specache_fx.passes.duplicate_query import lane_inputs
from specache_fx.runtime.layers.masks import WindowMask
from specache_fx.runtime.session.next_answer import LaneCall

WindowMasks = dict[int, tuple[WindowMask | None, ...]]  # `DecodeStep.window_masks`


class GraphInputs:
    """The inputs of one decode graph.

    Args:
        gm: The graph, before it is traced for lanes.
        program: The findings on it.

    Attributes:
        varying: Which of the graph's inputs are no weights.
    """

    def __init__(self, gm: GraphModule, program: Program) -> None:
        assert program.decoding is not None
        self._prelude = program.decoding.prelude
        self._expansions = [site.expansion for site in program.sites if site.expansion is not None]
        given = placeholders(gm.graph)
        # Each input's place among Dynamo's. Results of the prelude have none: `_cuts` says which each of them is.
        self._origins = [node.meta.get("specache_input", 0) for node in given]
        self._cuts = [
            (i, node.meta["specache_prelude"])
            for i, node in enumerate(given)
            if "specache_prelude" in node.meta
        ]
        self._by_lane = [i for i, differs in enumerate(lane_inputs(gm, program)) if differs]
        self._tokens = [i for i in self._by_lane if "specache_prelude" not in given[i].meta]
        # A parameter's shape is Dynamo's to guard.
        self.varying = [i for i, node in enumerate(given) if not is_static_input(node)]
        # Positions are a slice of all tokens' ones, whose strides grow with each token. Floats may be states, to which
        # the graph writes.
        self._integers = [
            i
            for i in self.varying
            if isinstance(value := value_of(given[i]), torch.Tensor) and not value.is_floating_point()
        ]

    def bind(
        self, args: Sequence[Any], speculative: torch.Tensor | None, lanes: int, ahead: int
    ) -> list[Any]:
        """The graph's inputs.

        Args:
            args: Dynamo's, of lane 0.
            speculative: Lane 1's token, of the shape of lane 0's, `[batch, 1]`; None with one lane.
            lanes: 1 or 2.
            ahead: Tokens from lane 0 to lane 1.

        Returns:
            In the graph's order. Those that differ by lane are `[2, ...]` with two lanes: the token, and results of the
            prelude.
        """
        boundary = self._prelude.now(args)
        if lanes > 1:
            following = self._prelude.ahead(args, ahead) if ahead else boundary
            if following is None or [new.shape for new in following] != [old.shape for old in boundary]:
                following = boundary  # the model has no such position
            boundary = tuple(torch.stack(pair) for pair in zip(boundary, following, strict=True))
        inputs = [args[index] for index in self._origins]
        for i, cut in self._cuts:
            inputs[i] = boundary[cut]
        for i in self._tokens if lanes > 1 else ():
            assert speculative is not None
            inputs[i] = torch.stack([inputs[i], speculative])
        for i in self._integers:
            inputs[i] = inputs[i].contiguous()
        return inputs

    def of_lane(
        self, args: Sequence[Any], inputs: Sequence[Any], windows: WindowMasks, lane: int
    ) -> LaneCall | None:
        """The inputs of a call's token, or of lane 1 of a step of two; None where its masks are unknown.

        Args:
            args: Dynamo's inputs.
            inputs: From `bind`, for `lane + 1` lanes.
            windows: Likewise, `DecodeStep.window_masks`.
            lane: 0 or 1.
        """
        computed = [inputs[i][1] if lane else inputs[i] for i in self._by_lane]
        rest = [value for i, value in enumerate(inputs) if i not in self._by_lane]
        numbers: list[Any] = [value for value in rest if not isinstance(value, torch.Tensor)]
        # The expansion of latent attention is no input of the decode graph.
        rest += [args[i] for expansion in self._expansions for i in expansion.inputs]
        for layer, masks in windows.items():
            if (mask := masks[lane]) is None:
                return None
            parts = [part for part in (mask.seen, mask.bias) if part is not None]
            numbers.append((layer, mask.width, mask.seen is None, mask.bias is None))
            computed = computed + parts
        tensors = [value for value in rest if isinstance(value, torch.Tensor)]
        return LaneCall(self, computed, tensors, numbers)

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The shapes, strides and numbers that a graph compiled for these inputs is valid for."""
        return tuple(
            _layout(inputs[i]) if isinstance(inputs[i], torch.Tensor) else inputs[i] for i in self.varying
        )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = tuple(tensor.shape)
    return (shape,) if tensor.is_contiguous() else (shape, tensor.stride())

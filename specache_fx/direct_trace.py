"""A decode step's graph without Dynamo: the model's `forward` runs once on fake tensors, and is recorded.

    the call      fake tensors of the arguments; their batch, and a mask's length, are symbols
    the model     copies of its modules (`model_twin.py`), which hold fake weights
    the cache     a copy, of fake pairs; their length is a symbol
      -> a graph as Dynamo makes it, traced as that is
    its results   which is what: a part of the output, or keys or values of a layer

Dynamo reads the model's code, and guards each value that it finds there. That takes four times as long for a first
graph, and checks thousands of guards a step. Such a graph here is valid as long as the model's state is what it was
(`model_state.py`), for calls of the same form whose sizes its guards allow.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import sympy
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from specache_fx.capture.graph_utils import STATIC, placeholders
from specache_fx.capture.recorder import NotDirect, Recorder
from specache_fx.capture.trace import trace
from specache_fx.errors import first_line
from specache_fx.known_caches import filled, states_of, window_of
from specache_fx.model_twin import Twin, named_tensors

CACHE = object()
"""Stands for the cache in an output."""

_PAIR = ("keys", "values")


class Result(int):
    """The place of a result in an output."""


class Input(NamedTuple):
    """Where an input of the graph is read.

    Attributes:
        kind: "argument" of the call; "weight" of the model; "keys", "values", "count" or "state" of a layer of the
            cache; or "size", a symbol.
        name: Of the argument, weight or symbol, or of the attribute that has the state.
        layer: The layer's place in the cache.
        key: The state's place in that attribute.
    """

    kind: str
    name: str = ""
    layer: int = 0
    key: Any = None


class Traced(NamedTuple):
    """A traced step.

    Attributes:
        graph: Functional. Its results are the output's tensors, then keys and values of the layers in turn.
        inputs: Where each of its inputs is read.
        tree: Of the output.
        leaves: Of it: the place of a result, `CACHE`, or a value that is no tensor.
        counts: Layers that count the token.
        sizes: Where a call has each symbol's value: an input, and its dimension.
        guards: What has to hold of them.
        constants: Sizes below 2: an input, its dimension and the size.
    """

    graph: GraphModule
    inputs: list[Input]
    tree: Any
    leaves: list[Any]
    counts: list[int]
    sizes: dict[sympy.Symbol, list[tuple[Input, int]]]
    guards: list[sympy.Basic]
    constants: list[tuple[Input, int, int]]


def trace_step(module: nn.Module, given: Mapping[str, Any], batch: int) -> Traced:
    """Trace one call of a model that decodes a token of each row.

    Args:
        module: The model. It stays as it is.
        given: The call's arguments, with a growing cache of handles as `past_key_values`.
        batch: Rows.

    Raises:
        NotDirect: If the call can't be traced.
    """
    fakes = _Inputs(module, given, batch)
    step = _Step(module, given, fakes.inputs)
    try:
        with torch.no_grad(), fakes.mode, enable_python_dispatcher(), Recorder(fakes.values) as recorder:
            results = step.forward(*fakes.values)
        recorded = recorder.finish(results)
        for where, node in zip(fakes.inputs, placeholders(recorded.graph), strict=True):
            if where.kind == "weight":
                _note_weight(node, where.name)
        graph = trace(recorded)
    except NotDirect:
        raise
    except Exception as error:  # of any operator: Dynamo may trace it
        raise NotDirect(f"it can't be traced: {first_line(error)[:200]}") from error
    kept = []
    for where, node in zip(fakes.inputs, placeholders(graph.graph), strict=True):
        if node.users or where.kind in ("argument", *_PAIR):
            kept.append(where)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    guards = [guard.expr for guard in fakes.env.guards]
    return Traced(graph, kept, step.tree, step.leaves, step.counts, fakes.places, guards, fakes.constants)


class _Inputs:
    """Fake inputs of a step.

    Attributes:
        inputs: Where each is read.
        values: The fake tensors and symbols.
        env: The symbols' environment.
        places: See `Traced.sizes`.
        constants: See `Traced`.
        mode: Theirs.
    """

    def __init__(self, module: nn.Module, given: Mapping[str, Any], batch: int) -> None:
        self.env = ShapeEnv()
        self.inputs: list[Input] = []
        self.values: list[Any] = []
        self.places: dict[sympy.Symbol, list[tuple[Input, int]]] = {}
        self.constants: list[tuple[Input, int, int]] = []
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self._symbols: dict[Any, Any] = {}
        self._rows: Any = batch
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                self._add_argument(name, value, batch)
        seen: set[int] = set()
        for name, weight in named_tensors(module):
            if id(weight) not in seen:  # one of two names
                seen.add(id(weight))
                self._add(Input("weight", name), self._empty(weight.shape, weight, weight.stride()))
        cache = given["past_key_values"]
        layers = {id(layer) for layer in filled(cache)}
        for i, layer in enumerate(cache.layers):
            if id(layer) in layers:
                self._add_layer(i, layer)
            for name, key, state in states_of(layer):
                self._add_state(Input("state", name, i, key), state, batch)
        # As Dynamo has them: symbols are inputs of their own, and first.
        sizes = list(self._symbols.values())
        self.inputs[:0] = [Input("size", str(size.node.expr)) for size in sizes]
        self.values[:0] = sizes

    def _add(self, where: Input, value: Any) -> None:
        self.inputs.append(where)
        self.values.append(value)

    def _add_argument(self, name: str, value: torch.Tensor, batch: int) -> None:
        where, shape = Input("argument", name), list(value.shape)
        if shape and shape[0] == batch:
            self._rows = shape[0] = self._size("batch", batch, where, 0)
        if name == "attention_mask":
            shape[-1] = self._size("mask", shape[-1], where, value.dim() - 1)
        self._add(where, self._empty(shape, value))

    def _add_layer(self, i: int, layer: Any) -> None:
        for side in _PAIR:
            handle = getattr(layer, side)
            _, heads, kv_len, dim = handle.shape
            where = Input(side, layer=i)
            length = self._size(("kv_len", window_of(layer)), kv_len, where, 2)
            self._add(where, self._empty((self._rows, heads, length, dim), handle))
        if isinstance(count := vars(layer).get("cumulative_length"), int):
            where = Input("count", layer=i)
            self._add(where, self._size("count", count, where, 0))

    def _add_state(self, where: Input, state: torch.Tensor, batch: int) -> None:
        rows: Any = state.shape[0]
        if rows == batch:
            rows = self._rows
        else:
            self.constants.append((where, 0, rows))
        self._add(where, self._empty((rows, *state.shape[1:]), state))

    def _size(self, what: Any, value: int, where: Input, dim: int) -> Any:
        """A symbol, the same one for the same key; a constant below 2, as in all graphs."""
        if value < 2:
            self.constants.append((where, dim, value))
            return value
        if what not in self._symbols:
            source = ConstantSource(f"size_{len(self._symbols)}")
            symbol = self.env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
            self.places[symbol] = []
            self._symbols[what] = self.env.create_symintnode(symbol, hint=value, source=source)
        places = self.places[self._symbols[what].node.expr]
        if where.kind == "argument" or not places:  # a session's layers have one length
            places.append((where, dim))
        return self._symbols[what]

    def _empty(
        self, shape: Sequence[Any], like: torch.Tensor, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        with self.mode:
            if strides is not None:
                return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
            return torch.empty(shape, dtype=like.dtype, device=like.device)


class _Step:
    """The call, as a function of its inputs.

    Attributes:
        tree: See `Traced`.
        leaves: See `Traced`.
        counts: See `Traced`.
    """

    def __init__(self, module: nn.Module, given: Mapping[str, Any], inputs: Sequence[Input]) -> None:
        self._module, self._given, self._inputs = module, given, inputs
        self.tree: Any = None
        self.leaves: list[Any] = []
        self.counts: list[int] = []

    def forward(self, *flat: Any) -> tuple[torch.Tensor, ...]:
        """The output's tensors, then keys and values.

        Raises:
            NotDirect: If the call does more than its tensors show.
        """
        found = dict(zip(self._inputs, flat, strict=True))
        weights = {where.name: value for where, value in found.items() if where.kind == "weight"}
        twin, cache = Twin(self._module, weights), self._cache(found)
        arguments = {name: found.get(Input("argument", name), value) for name, value in self._given.items()}
        before = [_content(each) for each in (cache, *cache.layers)]
        out = twin.module(**{**arguments, "past_key_values": cache})
        twin.check_unchanged()
        _check_cache(before, cache)
        for where, count in found.items():
            if where.kind == "count" and cache.layers[where.layer].cumulative_length is not count:
                self.counts.append(where.layer)
        leaves, self.tree = pytree.tree_flatten(out, is_leaf=lambda each: each is cache)
        tensors: list[torch.Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self.leaves.append(Result(len(tensors)))
                tensors.append(leaf)
            elif leaf is cache or isinstance(leaf, (bool, str, type(None))):
                self.leaves.append(CACHE if leaf is cache else leaf)
            else:
                raise NotDirect(f"its output has a {type(leaf).__name__}")
        pairs = [getattr(cache.layers[where.layer], where.kind) for where in found if where.kind in _PAIR]
        return (*tensors, *pairs)

    def _cache(self, found: Mapping[Input, Any]) -> Any:
        """A copy of the cache, with these pairs and counts."""
        cache = copy.copy(self._given["past_key_values"])
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in cache.layers:
            vars(layer).update(
                (name, dict(value)) for name, value in vars(layer).items() if isinstance(value, dict)
            )
        for where, value in found.items():
            if where.kind in _PAIR:
                setattr(cache.layers[where.layer], where.kind, value)
            elif where.kind == "count":
                cache.layers[where.layer].cumulative_length = value
            elif where.kind == "state":
                getattr(cache.layers[where.layer], where.name)[where.key] = value
        return cache


def _check_cache(before: Sequence[Mapping[str, Any]], cache: Any) -> None:
    """Refuse a step that changes more of a cache than its pairs and counts.

    Raises:
        NotDirect: If it does.
    """
    if len(before) != 1 + len(cache.layers):
        raise NotDirect("it adds layers to the cache")
    for then, each in zip(before, (cache, *cache.layers), strict=True):
        now = _content(each)
        for name in {*now, *then}:
            if now.get(name) is then.get(name) or (each is not cache and name in _PAIR):
                continue
            if name != "cumulative_length" or now[name] != then[name] + 1:
                raise NotDirect(f"it changes {name} of {type(each).__name__}")


def _content(each: Any) -> dict[Any, Any]:
    """Attributes, and what those hold that are dicts."""
    inner = {
        (name, key): item
        for name, value in vars(each).items()
        if isinstance(value, dict)
        for key, item in value.items()
    }
    return vars(each) | inner


def _note_weight(node: Node, name: str) -> None:
    """Mark an input as Dynamo marks a parameter."""
    *path, last = name.split(".")
    modules = "".join(f"._modules['{part}']" for part in path)
    source = f"L['self']{modules}._parameters['{last}']"
    node.meta["tensor_dict"] = {STATIC: True}
    node.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=source))

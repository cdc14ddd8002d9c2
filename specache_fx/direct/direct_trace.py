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

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from specache_fx.calls.known_caches import copied, has_tokens, states_of, window_of
from specache_fx.capture.graph.fake_results import FakeResults
from specache_fx.capture.graph.graph_utils import STATIC, placeholders
from specache_fx.capture.graph.recorder import NotDirect, Recorder
from specache_fx.capture.graph.trace import trace
from specache_fx.direct.model_state import Contents, held_by
from specache_fx.direct.model_twin import named_tensors, twins_of
from specache_fx.errors import first_line

CACHE = object()
"""Stands for the cache in an output."""

_PAIR = ("keys", "values")
_COUNT = "cumulative_length"


class Result(int):
    """The place of a result in an output."""


class Input(NamedTuple):
    """Where an input of the graph is read.

    Attributes:
        kind: "argument" of the call; "weight" of the model; "keys", "values", "cumulative_length" or "state" of a layer
            of the cache; or "size", a symbol.
        name: Of the argument, weight or symbol, or of the attribute that has the state.
        layer: The layer's place in the cache.
        key: The state's place in that attribute.
    """

    kind: str
    name: str = ""
    layer: int = 0
    key: Any = None

    def read(self, given: Mapping[str, Any], layers: Sequence[Any]) -> Any:
        """Its value in a call, of an argument or of the cache."""
        if self.kind == "argument":
            return given[self.name]
        layer = layers[self.layer]
        return getattr(layer, self.name)[self.key] if self.kind == "state" else getattr(layer, self.kind)

    def size(self, given: Mapping[str, Any], layers: Sequence[Any], dim: int) -> int:
        """A size of it in a call, or the number that it is."""
        value = self.read(given, layers)
        return value if self.kind == _COUNT else int(value.shape[dim])


class Validity:
    """Sizes of a graph's inputs, and what has to hold of them.

    Attributes:
        symbols: By what has such a size.
    """

    def __init__(self) -> None:
        self.env, self.symbols = ShapeEnv(), dict[Any, Any]()
        self._places: dict[str | int, list[tuple[Input, int]]] = {}  # of each symbol, and of each constant
        self._holds: Callable[..., bool]

    def size(self, what: Any, value: int, where: Input, dim: int) -> Any:
        """A symbol, the same one for the same key; a constant below 2, as in all graphs."""
        if value < 2:
            return self.constant(value, where, dim)
        if what not in self.symbols:
            source = ConstantSource(f"size_{len(self.symbols)}")
            symbol = self.env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
            self.symbols[what] = self.env.create_symintnode(symbol, hint=value, source=source)
        places = self._places.setdefault(self.symbols[what].node.expr.name, [])  # str() would take 2 ms
        if where.kind == "argument" or not places:  # a session's layers have one length
            places.append((where, dim))
        return self.symbols[what]

    def constant(self, value: int, where: Input, dim: int) -> int:
        """A size that calls of this graph have."""
        self._places.setdefault(value, []).append((where, dim))
        return value

    def take_guards(self) -> None:
        """Take what the trace has found to hold, as `ShapeEnv` evaluates it."""
        guards = [f"({PythonPrinter().doprint(guard.expr)})" for guard in self.env.guards]
        names = (size for size in self._places if isinstance(size, str))
        code = f"lambda {', '.join(names)}: {' and '.join(guards) or True}"
        self._holds = eval(code, dict(SYMPY_INTERP))

    def values(self, given: Mapping[str, Any], layers: Sequence[Any]) -> dict[str, int] | None:
        """The symbols' values in a call; None where the graph does not hold for it."""
        values: dict[str, int] = {}
        for size, places in self._places.items():
            found = {where.size(given, layers, dim) for where, dim in places}
            value = found.pop()
            if found or (value < 2 if isinstance(size, str) else value != size):
                return None
            if isinstance(size, str):
                values[size] = value
        return values if self._holds(**values) else None


class Output(NamedTuple):
    """What a call of the model returns and leaves in its cache.

    Attributes:
        tree: Of the output.
        leaves: Of it: the place of a result, `CACHE`, or a value that is no tensor.
        filled: Layers that get keys and values: the results behind those of the output.
        counting: Layers that count the token.
    """

    tree: Any
    leaves: list[Any]
    filled: list[int]
    counting: list[int]

    def put(self, results: Sequence[Any], cache: Any) -> Any:
        """The output of a call with these results, and its cache filled."""
        num_pairs = 2 * len(self.filled)
        pairs = iter(results[len(results) - num_pairs :])
        for i in self.filled:
            cache.layers[i].keys, cache.layers[i].values = next(pairs), next(pairs)
        for i in self.counting:
            cache.layers[i].cumulative_length += 1
        leaves = [
            results[leaf] if isinstance(leaf, Result) else cache if leaf is CACHE else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.tree)


class Traced(NamedTuple):
    """A traced step.

    Attributes:
        graph: Functional. Its results are the output's tensors, then keys and values of the layers in turn.
        inputs: Where each of its inputs is read.
        output: What becomes of its results.
        validity: For which calls it is.
    """

    graph: GraphModule
    inputs: list[Input]
    output: Output
    validity: Validity


def trace_step(module: nn.Module, given: Mapping[str, Any], batch: int) -> Traced:
    """Trace one call of a model that decodes a token of each row.

    Args:
        module: The model. It stays as it is.
        given: The call's arguments, with a growing cache of handles as `past_key_values`.
        batch: Rows.

    Raises:
        NotDirect: If the call can't be traced.
    """
    fakes = _Fakes(module, given, batch)
    inputs, values = list(fakes.found), list(fakes.found.values())
    try:
        with torch.no_grad(), fakes.mode, enable_python_dispatcher(), Recorder(values) as recorder:
            results, output = _run(module, given, fakes)
        recorded = recorder.finish(results)
        for where, node in zip(inputs, placeholders(recorded.graph), strict=True):
            if where.kind == "weight":
                _note_weight(node, where.name)
        graph = trace(recorded, edit=True)
    except NotDirect:
        raise
    except Exception as error:  # of any operator: Dynamo may trace it
        raise NotDirect(f"it can't be traced: {first_line(error)[:200]}") from error
    kept = []
    for where, node in zip(inputs, placeholders(graph.graph), strict=True):
        if node.users or where.kind in ("argument", *_PAIR):
            kept.append(where)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    fakes.validity.take_guards()
    return Traced(graph, kept, output, fakes.validity)


class _Fakes:
    """Fake inputs of a step.

    Attributes:
        cache: A copy of the cache, with fake pairs, counts and states.
        found: The fake tensors and symbols, by where each is read.
        mode: Theirs.
        validity: Their sizes.
    """

    def __init__(self, module: nn.Module, given: Mapping[str, Any], batch: int) -> None:
        self.validity, self._batch, self._rows = Validity(), batch, batch
        self.mode = FakeTensorMode(shape_env=self.validity.env, allow_non_fake_inputs=True)
        self.cache, self._results = copied(given["past_key_values"]), FakeResults(copies=True)
        tensors = {
            Input("argument", name): self._argument(name, value)
            for name, value in given.items()
            if isinstance(value, torch.Tensor)
        }
        seen: set[int] = set()
        for name, weight in named_tensors(module):
            if id(weight) not in seen:  # one of two names
                seen.add(id(weight))
                tensors[Input("weight", name)] = self._empty(weight.shape, weight, weight.stride())
        for i, layer in enumerate(self.cache.layers):
            tensors |= self._layer(i, layer)
        # As Dynamo has them: symbols are inputs of their own, and first.
        sizes = {Input("size", str(size.node.expr)): size for size in self.validity.symbols.values()}
        self.found: dict[Input, Any] = sizes | tensors

    def _argument(self, name: str, value: torch.Tensor) -> Any:
        where, shape = Input("argument", name), list[Any](value.shape)
        if shape and shape[0] == self._batch:
            self._rows = shape[0] = self.validity.size("batch", self._batch, where, 0)
        if name == "attention_mask":
            shape[-1] = self.validity.size("mask", shape[-1], where, value.dim() - 1)
        return self._empty(shape, value)

    def _layer(self, i: int, layer: Any) -> Iterator[tuple[Input, Any]]:
        """What a layer holds, which is put into it."""
        for side in _PAIR if has_tokens(layer) else ():
            handle, where = getattr(layer, side), Input(side, layer=i)
            _, heads, kv_len, dim = handle.shape
            length = self.validity.size(("kv_len", window_of(layer)), kv_len, where, 2)
            fake = self._empty((self._rows, heads, length, dim), handle)
            setattr(layer, side, fake)
            yield where, fake
        if has_tokens(layer) and isinstance(count := vars(layer).get(_COUNT), int):
            where = Input(_COUNT, layer=i)
            layer.cumulative_length = self.validity.size("count", count, where, 0)
            yield where, layer.cumulative_length
        for name, key, state in list(states_of(layer)):
            where, rows = Input("state", name, i, key), state.shape[0]
            rows = self._rows if rows == self._batch else self.validity.constant(rows, where, 0)
            fake = getattr(layer, name)[key] = self._empty((rows, *state.shape[1:]), state)
            yield where, fake

    def _empty(
        self, shape: Sequence[Any], like: torch.Tensor, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        form: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        with self.mode:
            if strides is None:  # a state is written in place, so it shares no storage
                return torch.empty(shape, **form)
            made: torch.Tensor = self._results.call(torch.empty_strided, (shape, strides), form)
        return made


def _run(
    module: nn.Module, given: Mapping[str, Any], fakes: _Fakes
) -> tuple[tuple[torch.Tensor, ...], Output]:
    """Call the model on fakes.

    Returns:
        The output's tensors, then keys and values; and what they are.

    Raises:
        NotDirect: If the call does more than its tensors show.
    """
    cache, weights = fakes.cache, {at.name: fake for at, fake in fakes.found.items() if at.kind == "weight"}
    arguments = {name: fakes.found.get(Input("argument", name), value) for name, value in given.items()}
    twins, layers = twins_of(module, weights), list(cache.layers)
    before = [{**vars(layer)} for layer in layers]
    contents = Contents(held_by(map(vars, (*twins, cache, *layers))))
    out = twins[0](**{**arguments, "past_key_values": cache})
    pairs = [getattr(layers[at.layer], at.kind) for at in fakes.found if at.kind in _PAIR]
    filled = [at.layer for at in fakes.found if at.kind == "keys"]
    counting = [
        i for i in filled if _COUNT in before[i] and layers[i].cumulative_length == before[i][_COUNT] + 1
    ]
    for i in filled:
        taken = (*_PAIR, _COUNT) if i in counting else _PAIR
        vars(layers[i]).update({name: before[i][name] for name in taken})
    if not contents.is_same():
        raise NotDirect("its forward changes what it holds")
    leaves, tree = pytree.tree_flatten(out, is_leaf=lambda each: each is cache)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    places = map(Result, range(len(tensors)))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = next(places)
        elif leaf is cache:
            leaves[i] = CACHE
        elif not isinstance(leaf, (bool, str, type(None))):
            raise NotDirect(f"its output has a {type(leaf).__name__}")
    return (*tensors, *pairs), Output(tree, leaves, filled, counting)


def _note_weight(node: Node, name: str) -> None:
    """Mark an input as Dynamo marks a parameter."""
    *path, last = name.split(".")
    modules = "".join(f"._modules['{part}']" for part in path)
    source = f"L['self']{modules}._parameters['{last}']"
    node.meta["tensor_dict"] = {STATIC: True}
    node.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=source))

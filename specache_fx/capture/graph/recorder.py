"""A graph of torch's functions, as Dynamo makes them, by running a function on fake tensors.

    h = F.linear(x, weight)                  ->  linear = F.linear(x, weight)
    h.view(*h.shape[:-1], -1, 64)            ->  view = linear.view(size_0, 1, -1, 64)
    F.scaled_dot_product_attention(q, k, v)  ->  specache.scaled_dot_product_attention(q, k, v, None, 0.0, ...)

Each function of torch calls a mode first, with whatever Python code has computed by then: sizes of tensors are symbols,
and the graph computes what is made of symbols anew. Python's own branches leave guards on symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.amp import autocast_mode
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import OptimizedPythonReferenceAnalysis

from specache_fx.capture.graph.fake_results import FakeResults
from specache_fx.capture.graph.graph_edit import make_module
from specache_fx.capture.graph.graph_utils import value_of
from specache_fx.runtime.ops import SDPA

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# They give a tensor another shape, which other nodes have noted.
_RESHAPES = frozenset(
    (
        *("as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_"),
        *("transpose_", "unsqueeze_", "__set__", "__delete__"),
    )
)
_READS = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr"))  # numbers, which fake tensors don't have
# Of Python's types, which the code of a graph can't name.
_DTYPES = {int: torch.int64, float: torch.float64, bool: torch.bool}


class NotDirect(Exception):
    """A call that has no graph without Dynamo, and why."""


class Recorder(TorchFunctionMode):
    """Notes what runs in it.

    Args:
        inputs: Fake tensors, and symbols before the tensors that have them as sizes.
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        super().__init__()
        self._graph = Graph()
        self._tensors: dict[int, Node] = {}  # by identity; nodes keep their values alive
        self._symbols: dict[Any, Proxy] = {}
        self._tracer = GraphAppendingTracer(self._graph)
        inputs = list(inputs)
        self._device = next(value.device.type for value in inputs if isinstance(value, torch.Tensor))
        self._casts = self._around = self._autocast()
        self._entered: Node | None = None
        self._results = FakeResults(copies=True)
        for i, value in enumerate(inputs):
            node = self._graph.placeholder(f"input_{i}")
            self._note(node, value)
            if isinstance(value, _SYMBOLS):
                self._symbols[value.node.expr] = Proxy(node, self._tracer)

    def finish(self, results: Sequence[torch.Tensor]) -> GraphModule:
        """The graph, with these results."""
        self._cast_as(self._around)
        self._graph.output(self._operands(tuple(results)))
        return make_module(torch.nn.Module(), self._graph)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and note it where a tensor comes of it."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            func = SDPA
        name = getattr(func, "__name__", "")
        if name in _RESHAPES:
            raise NotDirect(f"{name} changes a tensor's shape")
        if name in _READS:
            raise NotDirect(f"{name} reads a tensor's numbers")
        if name != "__get__":
            self._check(args)
            self._check(kwargs.values())
        self._cast_as(self._autocast())
        result = self._results.call(func, args, kwargs, self._casts)
        if name == "__get__":
            if isinstance(result, torch.Tensor):
                self._call(getattr, (args[0], func.__self__.__name__), {}, result)
        elif result is None or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._call(_as_method(func) or func, args, kwargs, result)
        return result

    def _call(
        self, target: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        op = "call_method" if isinstance(target, str) else "call_function"
        operands = self._operands(tuple(args)), self._operands(dict(kwargs))
        self._note(self._graph.create_node(op, target, *operands), result)

    def _note(self, node: Node, value: Any) -> None:
        """Note the node that computes a value, or a list of them."""
        node.meta["example_value"] = value
        if isinstance(value, torch.Tensor):
            self._tensors[id(value)] = node
        elif isinstance(value, (list, tuple)):
            for i, each in enumerate(value):
                if isinstance(each, (torch.Tensor, list, tuple)):
                    self._note(self._graph.call_function(operator.getitem, (node, i)), each)

    def _check(self, args: Iterable[Any]) -> None:
        """Refuse tensors of which the graph knows nothing: reads of them would be constants."""
        for each in args:
            if isinstance(each, torch.Tensor) and id(each) not in self._tensors:
                raise NotDirect("it reads a tensor that is no parameter, buffer or argument")
            if isinstance(each, (list, tuple)):
                self._check(each)

    def _operands(self, args: Any) -> Any:
        return map_aggregate(args, self._operand)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._check((value,))
            return self._tensors[id(value)]
        if isinstance(value, type):
            return _DTYPES.get(value, value)
        return self._computed(value.node.expr) if isinstance(value, _SYMBOLS) else value

    def _computed(self, expr: Any) -> Any:
        """The node that computes an expression of symbols; a number of one that has none."""
        if expr.is_number:
            return int(expr) if expr.is_Integer else float(expr)
        if expr not in self._symbols:
            last = next(iter(reversed(self._graph.nodes)))
            found = sympy_interp(OptimizedPythonReferenceAnalysis, self._symbols, expr)
            node = last.next
            while node.op != "root":
                node.meta["example_value"] = node.target(*map_aggregate(node.args, value_of))
                node = node.next
            self._symbols[expr] = found
        return self._symbols[expr].node

    def _autocast(self) -> tuple[Any, ...]:
        """The autocast that is on, as `_enter_autocast` takes it."""
        kind = self._device
        return (
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
            torch.is_autocast_cache_enabled(),
        )

    def _cast_as(self, casts: tuple[Any, ...]) -> None:
        """Enter or leave an autocast, as Dynamo notes one."""
        if casts == self._casts:
            return
        if self._entered is not None:
            self._graph.call_function(autocast_mode._exit_autocast, (self._entered,))
            self._entered = None
        if casts != self._around:
            self._entered = self._graph.call_function(autocast_mode._enter_autocast, casts)
        self._casts = casts


def _as_method(func: Any) -> str | None:
    """The name of the method that a function is; that of `**` wraps `pow`."""
    for each in (func, getattr(func, "__wrapped__", None)):
        name = getattr(each, "__name__", "")
        if name and getattr(torch.Tensor, name, None) is each:
            return str(name)
    return None

"""Functionalisation: Dynamo's graph as functional ATen, the one spelling that all passes read.

    keys = torch.cat([past, k], dim=-2)             ->  keys = aten.cat([past, k], -2)
    s = q @ keys.mT; s += mask; s.softmax(-1)           reshape, transpose, bmm, reshape, add, _softmax
    out = F.scaled_dot_product_attention(q, keys, v)    out = specache.scaled_dot_product_attention(q, keys, v)

The graph is run once on Dynamo's own fake inputs under functionalisation, as AOTAutograd does. No operator writes in
place then, `out=`, views and vmap are resolved, and autocast's casts are in the graph. A write to an input is a
`copy_` to its placeholder, behind all else. SDPA stays one call: an operator of ours that is pure and has no insides.

Inputs are those of Dynamo, in its order; tensor subclasses (torchao's weights) are taken apart (`subclasses.flatten`).
A result of one of Dynamo's nodes has that node's name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import is_from_unspecialized_param_buffer_source
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,
    has_data_mutation,
    has_metadata_mutation,
    to_fun,
)
from torch._guards import TracingContext
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from specache_fx.capture.graph.dynamo_graph import prepare
from specache_fx.capture.graph.graph_edit import (
    CallsOnce,
    copy_graph,
    fake_mode_of,
    finish,
    make_module,
)
from specache_fx.capture.graph.graph_slices import eliminate_dead_code, writes_in_place
from specache_fx.capture.graph.graph_utils import (
    STATIC,
    concatenated,
    is_static_input,
    placeholders,
    target_name,
    value_of,
)
from specache_fx.capture.graph.segments import NAME, CannotCut, Joined, Segment, cut
from specache_fx.capture.graph.simplify import merge_equal_calls, simplify
from specache_fx.capture.graph.subclasses import flatten, unflatten
from specache_fx.errors import first_line
from specache_fx.runtime.handles.handle_form import is_laid_out
from specache_fx.runtime.ops import SDPA

_KEPT = ("tensor_dict", "grapharg", "_dynamo_source", "stack_trace")  # of a placeholder's meta
GROWS = "specache_grows"  # in the meta of a placeholder: a buffer of the model that is a growing cache
aten = torch.ops.aten


class TraceError(Exception):
    """A graph can't be traced to functional ATen."""


def trace(gm: GraphModule, *, edit: bool = False) -> GraphModule:
    """Trace a graph of Dynamo's.

    Args:
        gm: The graph. Inputs have their fake values, as Dynamo noted them.
        edit: Whether it may change.

    Returns:
        The functional graph. Values are noted as `val`.

    Raises:
        TraceError: If it does something that a functional graph can't.
    """
    marked = prepare(gm if edit else copy_graph(gm))
    inputs = [value_of(node) for node in placeholders(gm.graph)]
    try:
        try:
            traced = _by_segments(marked)
        except (CannotCut, TraceError):  # a view may be written to in another segment
            traced = _functional_graph(_Named(marked).run, inputs)
            for node in traced.graph.nodes:
                node._rename(node.meta.pop(NAME, node.name))
    except TraceError:
        raise
    except Exception as error:  # of any operator: the model runs as it is then
        raise TraceError(first_line(error)) from error
    _note_inputs(gm, traced.graph, inputs)
    simplify(traced.graph)
    eliminate_dead_code(traced.graph)
    _note_growing_buffers(traced.graph)
    merge_equal_calls(traced.graph)
    return finish(make_module(traced, traced.graph))


def _by_segments(gm: GraphModule) -> GraphModule:
    """Trace segments, equal ones once.

    Raises:
        CannotCut: If they are to be traced together.
    """
    segments = cut(gm.graph, lambda node: node.target is SDPA or target_name(node) == "softmax")
    given = [value_of(node) for node in placeholders(gm.graph)]
    # A subclass has more than its signature.
    if list(map(id, flatten(given))) != list(map(id, given)):
        raise CannotCut
    forms = [segment.fingerprint() for segment in segments]
    if len(set(forms)) == len(forms):
        raise CannotCut

    def traced(segment: Segment) -> GraphModule:
        run, inputs = _Named(segment.graph(gm)).run, [value_of(node) for node in segment.inputs]
        functional = _functional_graph(run, inputs)
        if any(map(writes_in_place, functional.graph.nodes)):
            raise CannotCut
        return functional

    joined = Joined(gm)
    for segment, form in zip(segments, forms, strict=True):
        joined.add(segment, form, traced)
    return joined.finish()


def _functional_graph(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
    def run(*flat: Any) -> Any:
        with _functional():
            wrapped = [to_fun(value) if isinstance(value, torch.Tensor) else value for value in flat]
            out = function(*unflatten(inputs, wrapped))
            out = pytree.tree_map_only(torch.Tensor, from_fun, out)
        _write_inputs(flat, wrapped)
        return out

    flat = flatten(inputs)
    # Whether a value is contiguous is not noted: it would be asked of its sizes, and so be a guard on them.
    unnoted = mock.patch.object(proxy_tensor, "_extract_tensor_metadata", return_value=None)
    with torch.no_grad(), preserve_node_meta(), _fake(flat), unnoted:
        make = make_fx(
            run,
            decomposition_table=_DECOMPOSED,
            tracing_mode="real",
            _allow_non_fake_inputs=True,
        )
        traced: GraphModule = make(*flat)
        return traced


def inline(
    function: Callable[..., Any], operands: Sequence[Any], before: Node, calls: CallsOnce | None = None
) -> Node:
    """Insert what a function of tensors computes.

    Args:
        function: Returns a tensor.
        operands: Its arguments: nodes of a functional graph, and constants.
        before: The node before which calls are inserted, and that they stand for.
        calls: Has made calls already, which are left out.
    """
    calls = CallsOnce() if calls is None else calls
    traced, copied = _graph_of(function, operands)
    for node in traced.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = map_arg((node.args, node.kwargs), copied.__getitem__)
        if node.target is aten.sym_size.int:
            copied[node] = calls.size(before, *args)
        elif node.target is aten._to_copy.default and not node.all_input_nodes:  # of a number, by vmap
            copied[node] = args[0]
        else:
            made = copied[node] = calls.call(before, node.target, *args, **kwargs)
            made.meta.setdefault("val", value_of(node))  # of a call without tensors
    (result,) = traced.output_node().args
    return copied[result]  # type: ignore[index]


def _graph_of(function: Callable[..., Any], operands: Sequence[Any]) -> tuple[Graph, dict[Node, Any]]:
    """The functional graph of a function, and the operands that its placeholders stand for."""
    nodes = [each for each in operands if isinstance(each, Node)]

    def of_nodes(*values: Any) -> Any:
        given = iter(values)
        return function(*(next(given) if isinstance(each, Node) else each for each in operands))

    traced = _functional_graph(of_nodes, [value_of(node) for node in nodes])
    simplify(traced.graph)
    eliminate_dead_code(traced.graph)
    return traced.graph, dict(zip(placeholders(traced.graph), nodes, strict=True))


class _Named(Interpreter):
    """Runs a graph while it is traced, and notes which node is the result of each of its own (`NAME`)."""

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if isinstance(result, FunctionalTensor):
            tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
            traced = get_proxy_slot(torch._from_functional_tensor(result.elem), tracer, None)
            if traced is not None:
                traced.proxy.node.meta.setdefault(NAME, n.name)
        return result


def _write_inputs(inputs: Sequence[Any], wrapped: Sequence[Any]) -> None:
    """Put writes to inputs behind all else; `wrapped` are the inputs under functionalisation, after the run."""
    tensors = [(x, inner) for x, inner in zip(inputs, wrapped, strict=True) if isinstance(x, torch.Tensor)]
    memory = Counter(x.untyped_storage()._cdata for x, _ in tensors)
    for x, inner in tensors:
        if has_metadata_mutation(inner, x, check_only_storage_mutation=False):
            raise TraceError("an input gets another shape in place")
        if not has_data_mutation(inner):
            continue
        # All handles of a session look at one storage, and stand for memory of their own.
        if memory[x.untyped_storage()._cdata] > 1 and not is_laid_out(x):
            raise TraceError("an input is written to that lies in the same memory as another one")
        written: Any = from_fun(inner)
        x.copy_(written)


def _note_growing_buffers(graph: Graph) -> None:
    """Buffers that the model appends to and replaces are caches: they lose Dynamo's mark of what stays."""
    outputs = set(graph.output_node().all_input_nodes)
    for node in placeholders(graph):
        source = getattr(node.meta.get("grapharg"), "source", None)
        if not is_static_input(node) or isinstance(value_of(node), torch.nn.Parameter) or source is None:
            continue
        grown = [user for user in node.users if (concatenated(user) or ([user], 0))[0][0] is node]
        cut = [user for each in grown for user in each.users if user.target is aten.slice.Tensor]
        if not outputs.isdisjoint((*grown, *cut)):
            rest = {key: value for key, value in node.meta["tensor_dict"].items() if key != STATIC}
            # A plain tensor of a module has that mark, too, and none of a buffer's constant sizes.
            node.meta |= {"tensor_dict": rest, GROWS: is_from_unspecialized_param_buffer_source(source)}


@contextlib.contextmanager
def _functional() -> Iterator[None]:
    more = {}
    if "_allow_token_discovery" in inspect.signature(FunctionalTensorMode.__init__).parameters:
        more = {"_allow_token_discovery": True}
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with torch._C._ExcludeDispatchKeyGuard(keys), FunctionalTensorMode(**more):
        yield


@contextlib.contextmanager
def _fake(inputs: Sequence[Any]) -> Iterator[None]:
    """A context in which new tensors are fake as the inputs are, and constants that Dynamo left real are constants."""
    mode = fake_mode_of(inputs)  # not the tracing context's: Dynamo changes that before it calls a backend
    assert mode is not None, "a graph without tensors is left alone"
    context = TracingContext.try_get()
    with contextlib.ExitStack() as stack:
        if context is not None:  # torch 2.11 traces the functions of flex attention in its mode
            stack.enter_context(mock.patch.object(context, "fake_mode", mode))
        stack.enter_context(mock.patch.object(mode, "allow_non_fake_inputs", True))
        # Without the dispatcher torch 2.11 makes constants of symbols.
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(mode)
        yield


def _copied(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten.copy`, by operators that vmap has rules for."""
    return src.to(device=self.device, dtype=self.dtype).expand(self.shape).clone()


def _product_and_sum(
    self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """`aten.baddbmm`, with a product of its own."""
    product = batch1.bmm(batch2)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (self if beta == 1 else self * beta)


def _of_merged_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """`SDPA` of `[batch, num_kv_heads, groups, tokens, dim]`, with one dimension for the heads."""
    if not query.dim() == key.dim() == value.dim() == 5:
        return NotImplemented
    groups = query.shape[1:3]
    sides = (x if x.shape[2] == 1 else x.expand(-1, *groups, -1, -1) for x in (key, value))
    key, value = (x.flatten(1, 2) for x in sides)
    if attn_mask is not None and attn_mask.dim() > 2:
        front = attn_mask.shape[-4:-2]
        if all(size == 1 for size in front):
            attn_mask = attn_mask.flatten(-4, -3) if len(front) > 1 else attn_mask
        else:
            attn_mask = attn_mask.expand(*attn_mask.shape[:-4], *groups, -1, -1).flatten(-4, -3)
    given = dict(zip(("dropout_p", "is_causal", "scale"), rest, strict=False)) | kwargs | {"enable_gqa": True}
    return SDPA(query.flatten(1, 2), key, value, attn_mask, **given).unflatten(1, groups)


_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    aten.copy.default: _copied,
    aten.baddbmm.default: _product_and_sum,
    SDPA: _of_merged_groups,
}


def _note_inputs(gm: GraphModule, graph: Graph, inputs: Sequence[Any]) -> None:
    """Give placeholders Dynamo's names, and what Dynamo knows of them."""
    parts = [
        node for node, value in zip(placeholders(gm.graph), inputs, strict=True) for _ in flatten([value])
    ]
    for new, old in zip(placeholders(graph), parts, strict=True):
        new.meta |= {key: old.meta[key] for key in _KEPT if key in old.meta}
        new._rename(old.name)

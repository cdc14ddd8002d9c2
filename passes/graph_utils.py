"""Small tools on FX graphs that every pass needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node

_VIEWS = {
    "to", "type", "transpose", "expand", "reshape", "view", "contiguous", "permute", "float", "type_as", "unsqueeze",
    "chunk", "split", "select", "narrow", "unbind", "diagonal", "movedim", "swapaxes", "swapdims", "t", "getattr",
    "unflatten", "view_as", "expand_as", "slice",
    "flatten", "detach", "getitem", "squeeze",
}  # fmt: skip
_METADATA = {"size", "numel", "dim", "stride", "ndimension", "is_contiguous", "data_ptr", "element_size"}
_METADATA_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "is_cuda"}
_MAKES_LIKE = {
    "new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like",
}  # fmt: skip
_CONSTANT_NODES = 50  # a factor is computed in fewer
_SAME_TOKENS = {"getitem", "contiguous", "clone", "to", "slice", "narrow"}
_VMAP_DATA = {"_add_batch_dim", "_remove_batch_dim"}
_VMAP_LEVELS = {"_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions"}
_IN_PLACE_FUNCTIONS = {"setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior"}


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy that may be edited: Dynamo goes on using its own graph."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copied))
    for old, new in copied.items():
        new.meta = dict(old.meta)
    output = next(iter(reversed(graph.nodes)))
    output.meta = dict(next(iter(reversed(gm.graph.nodes))).meta)
    return GraphModule(gm, graph)


def value_of(node: Any) -> Any:
    """The fake value of a node (`example_value` in Dynamo's graphs, `val` in ATen's), or the constant itself."""
    if not isinstance(node, Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Shape of a tensor node; None for what is no tensor."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def is_integer(node: Any) -> bool:
    """Whether a node is a Python or symbolic integer."""
    return (
        isinstance(node, Node)
        and isinstance(value_of(node), (int, torch.SymInt))
        and not isinstance(value_of(node), bool)
    )


def symbols_of(size: Any) -> set[Any]:
    """The free symbols of a size."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def is_static_input(node: Node) -> bool:
    """Whether a placeholder is a parameter or buffer of the model."""
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def target_name(node: Node) -> str:
    """Short name of what a node calls: `cat`, `softmax`, `getitem`, ..."""
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target) if node.op == "call_method" else node.op


def reads_shape_only(user: Node) -> bool:
    """Whether a node reads nothing of its input but shape, dtype or device."""
    if target_name(user) in _MAKES_LIKE:
        return not any(shape_of(other) for other in user.all_input_nodes[1:])
    if user.op == "call_method":
        return user.target in _METADATA
    if user.op == "call_function" and user.target is getattr:
        return user.args[1] in _METADATA_ATTRIBUTES
    return target_name(user).startswith("sym_size") or target_name(user) == "is_tracing"


def source_of(node: Node) -> str:
    """The line of the model that made a node, "file:line: code": where it calls into transformers' integrations."""
    frames = re.findall(
        r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', node.meta.get("stack_trace") or ""
    )
    frames = [frame for frame in frames if "transformers/integrations" not in frame[0]] or frames
    return f"{frames[-1][0]}:{frames[-1][1]}: {frames[-1][2].strip()}" if frames else ""


def placeholders(graph: Graph) -> list[Node]:
    """The graph's inputs, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_node(graph: Graph) -> Node:
    """The graph's output."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def add_placeholder(graph: Graph, name: str, value: Any) -> Node:
    """A new last input, with a fake value in the fake mode of the others."""
    others = placeholders(graph)
    with graph.inserting_after(others[-1]):
        node = graph.placeholder(name)
    mode = _fake_mode(value_of(other) for other in others)
    key = "example_value" if "example_value" in others[-1].meta else "val"
    node.meta[key] = (
        mode.from_tensor(value) if mode is not None and isinstance(value, torch.Tensor) else value
    )
    return node


def _fake_mode(values: Iterable[Any]) -> FakeTensorMode | None:
    """The fake mode of the values. Not the ambient one: Dynamo changes it before it calls a backend."""
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, FakeTensor):
                return item.fake_mode
    return None


def call(graph: Graph, target: Any, args: tuple[Any, ...], origin: Node, name: str | None = None) -> Node:
    """Insert a call at the graph's insertion point, with its fake value and where it comes from.

    Args:
        graph: The graph, within `inserting_before` or `inserting_after`.
        target: A function or operator.
        args: Nodes and constants.
        origin: The node that this call stands for: its source line is kept.
        name: What to call its result; FX makes it unique.
    """
    node = graph.create_node("call_function", target, args, name=name)
    node.meta = {
        k: v for k, v in origin.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")
    }
    tensors = [value_of(arg) for arg in node.all_input_nodes]
    mode = _fake_mode(tensors)
    if mode is not None:
        with mode, torch.no_grad():
            value = target(*torch.fx.node.map_arg(args, value_of))
        node.meta["example_value" if "example_value" in origin.meta else "val"] = value
    return node


def ancestors(nodes: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
    """The nodes and everything that they are computed from; of what is in `stop`, not what lies behind."""
    ends, seen = set(stop), set[Node]()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                work.extend(node.all_input_nodes)
    return seen


def needed_for(
    graph: Graph, results: Iterable[Node], inputs: Iterable[Node] = (), reader: Node | None = None
) -> set[Node]:
    """What computes `results` from `inputs`: their ancestors, and the in-place calls that change these on the way.

    Where these run under `torch.vmap`, the calls that begin and end its levels too: no edge leads there.

    Args:
        graph: The graph.
        results: What is wanted.
        inputs: What is given.
        reader: As this node finds the results, after all in-place calls before it; None for the last of them.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    results, inputs = list(results), set(inputs)
    last = max((order[node] for node in results), default=-1) if reader is None else order[reader]
    writes = [node for node in graph.nodes if mutates(node) and node.args and order[node] < last]
    needed = ancestors(results, inputs)
    while more := [
        node
        for node in writes
        if node not in needed and base_of(node.args[0]) in needed and base_of(node.args[0]) not in inputs
    ]:
        needed |= ancestors(more, inputs)
    return needed | _vmap_levels(graph, needed)


def _vmap_levels(graph: Graph, live: set[Node]) -> set[Node]:
    """The calls that begin and end the levels of `torch.vmap`, if a live node runs in one: all, in pairs."""
    if not any(target_name(node) in _VMAP_DATA for node in live):
        return set()
    return {node for node in graph.nodes if target_name(node) in _VMAP_LEVELS}


def constant_of(gm: GraphModule, value: Any) -> float | None:
    """The number that a constant, or a one-element tensor that is computed from constants alone, stands for."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, Node) or not isinstance(value_of(value), torch.Tensor):
        return None
    needed = needed_for(gm.graph, [value])
    computed = all(node.op in ("call_function", "call_method") for node in needed)
    if not computed or any(not isinstance(size, int) for size in shape_of(value) or ()):
        return None
    if value_of(value).numel() != 1 or len(needed) > _CONSTANT_NODES:
        return None
    with torch.no_grad():
        return float(extract(gm, [value], [])()[0])


def extract(
    gm: GraphModule, results: list[Node], inputs: list[Node], reader: Node | None = None
) -> GraphModule:
    """A graph of its own that computes `results` from `inputs`, in the order given; these may be any nodes.

    `reader`: see `needed_for`.
    """
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in inputs:
        copied[node] = graph.placeholder(node.name)
        copied[node].meta = dict(node.meta)
    needed = needed_for(gm.graph, results, inputs, reader)
    for node in gm.graph.nodes:
        if node in needed and node not in copied:
            copied[node] = graph.node_copy(node, lambda old: copied[old])
    graph.output(tuple(copied[node] for node in results))
    return GraphModule(gm, graph)


def mutates(node: Node) -> bool:
    """Whether a node writes to its first argument."""
    name = target_name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    if node.op == "call_method":
        return in_place
    schema = getattr(node.target, "_schema", None)
    mutable = (
        in_place
        or name in _IN_PLACE_FUNCTIONS
        or "out" in node.kwargs
        or getattr(schema, "is_mutable", False)
    )
    return node.op == "call_function" and bool(mutable)


def base_of(node: Any) -> Any:
    """The tensor that a view, or a view of a view, looks at."""
    while (
        isinstance(node, Node)
        and target_name(node) in _VIEWS
        and node.args
        and isinstance(node.args[0], Node)
    ):
        node = node.args[0]
    return node


def mutated_inputs(graph: Graph) -> list[Node]:
    """The inputs that the graph writes to: a recurrent state, a counter."""
    written = [base_of(node.args[0]) for node in graph.nodes if mutates(node) and node.args]
    return [node for node in dict.fromkeys(written) if isinstance(node, Node) and node.op == "placeholder"]


def grows(node: Any) -> bool:
    """Whether a result is a cache with this call's tokens appended, `cat([past, new])`, or the newest part of one."""
    while isinstance(node, Node) and target_name(node) in _SAME_TOKENS and node.args:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not torch.cat or len(shape_of(node) or ()) not in (3, 4):
        return False
    parts: Any = node.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) < 2:
        return False
    past = base_of(parts[0])
    return isinstance(past, Node) and (past.op == "placeholder" or shape_of(past) == (0,))


def eliminate_dead_code(graph: Graph, keep: Iterable[Node] = ()) -> int:
    """Erase what no output needs. FX's own pass erases in-place calls on live tensors; this one keeps them.

    Args:
        graph: The graph.
        keep: Nodes that are needed though nothing reads them.

    Returns:
        Number of nodes erased.
    """
    mutations: dict[Node, list[Node]] = {}
    work = list(keep)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or (node.op == "call_function" and _is_effectful(node)):
            work.append(node)
        elif mutates(node) and node.args:
            mutations.setdefault(base_of(node.args[0]), []).append(node)
    live: set[Node] = set()
    while work:
        node = work.pop()
        if node not in live:
            live.add(node)
            work.extend(node.all_input_nodes)
            work.extend(mutations.get(node, []))
    live |= _vmap_levels(graph, live)
    dead = [node for node in reversed(graph.nodes) if node not in live]
    for node in dead:
        graph.erase_node(node)
    return len(dead)


def _is_effectful(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.startswith("specache::") and schema.is_mutable


def finish(gm: GraphModule) -> GraphModule:
    """Check the graph and make its code again; every pass ends with it."""
    gm.graph.lint()
    gm.recompile()
    return gm

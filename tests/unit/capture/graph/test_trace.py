"""`trace`: a functional graph computes what Dynamo's graph does, and writes to inputs what that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from specache_fx.capture.graph.graph_slices import mutated_inputs
from specache_fx.capture.graph.graph_utils import placeholders, shape_of, source_of, target_name, value_of
from specache_fx.capture.graph.trace import TraceError, trace
from specache_fx.runtime.ops import SDPA


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """One that is there for its effect, and one that writes to its input."""
    library = torch.library.Library("traced", "DEF")
    library.define("note(Tensor x) -> ()")
    library.impl("note", lambda x: NOTES.append(1), "CompositeExplicitAutograd")
    torch.library.register_fake("traced::note", lambda x: None, lib=library)
    library.define("bump(Tensor(a!) x) -> ()")
    library.impl("bump", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")
    torch.library.register_fake("traced::bump", lambda x: None, lib=library)
    yield
    library._destroy()


NOTES: list[int] = []


class Case(nn.Module):
    """A function of a module with a layer and buffers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.lin = function, nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("state", torch.zeros(2, 8))
        for parameter in self.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Features:
    """Of a `Case` and its input."""

    def masks_written_in_place(s: Any, x: Tensor) -> Any:
        seen = torch.ones(2, 8, dtype=torch.bool)
        seen[:, 3] = False
        mask = torch.zeros(2, 8)
        mask.masked_fill_(~seen, -1e9)
        mask[..., 0] = 1
        mask[0].add_(2)
        return s.lin(x) + mask

    def out_argument(s: Any, x: Tensor) -> Any:
        out = torch.empty_like(x)
        torch.mul(x, 2, out=out)
        return s.lin(out)

    def buffers_written(s: Any, x: Tensor) -> Any:
        s.count += 1
        s.state.copy_(s.state * 0.5 + x)
        s.state[:, 2:4] = x[:, :2]
        return s.lin(s.state) + s.count

    def rows_read_back(s: Any, x: Tensor) -> Any:
        y = x.clone()
        y[:1] = 2 * x[:1]
        cast = torch.slice_scatter(x.bfloat16(), 3 * x[:1], 0, 0, 1)
        return y[:1] + 1, cast[:1] * 2

    def input_written_through_a_view(s: Any, x: Tensor) -> Any:
        x[0].mul_(2)
        return s.lin(x)

    def results_that_alias(s: Any, x: Tensor) -> Any:
        y = s.lin(x)
        return y, y.view(16), y[0], y

    def operators_of_lists(s: Any, x: Tensor) -> Any:
        a, b = x.clone(), x.clone()
        torch._foreach_mul_([a, b], 2)
        return a + b

    def flags(s: Any, x: Tensor) -> Any:
        return F.relu(s.lin(x), inplace=True)

    def dropout_that_is_off(s: Any, x: Tensor) -> Any:
        y = x.clone()
        F.dropout(y, 0.5, False).mul_(3)
        return y

    def random_numbers(s: Any, x: Tensor) -> Any:
        return F.dropout(x, 0.5, True) + torch.rand_like(x) + torch.empty(2, 8).uniform_(0, 1)

    def random_numbers_that_nobody_reads(s: Any, x: Tensor) -> Any:
        torch.rand_like(x)
        return torch.randn(2, 8) + x

    def levels_of_vmap(s: Any, x: Tensor) -> Any:
        return torch.vmap(torch.vmap(lambda a: torch.where(a > 0, a, 0.0)))(s.lin(x))

    def constants(s: Any, x: Tensor) -> Any:
        return x + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]) + torch.cat([torch.tensor([]), torch.ones(8)])

    def attention_of_what_is_written_later(s: Any, x: Tensor) -> Any:
        q = x.view(1, 2, 2, 4).clone()
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3)
        q.zero_()
        return out + q

    def strides_written(s: Any, x: Tensor) -> Any:
        y = x.clone()
        y.t_()
        y.unsqueeze_(0)
        return y.sum(0)

    def checkpoints(s: Any, x: Tensor) -> Any:
        return checkpoint(lambda t: F.relu(s.lin(t)), x, use_reentrant=False)

    def branches(s: Any, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (x,))

    def autocast_of_a_part(s: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = s.lin(x)
        return y, s.lin(x)

    def effects(s: Any, x: Tensor) -> Any:
        torch.ops.traced.note(x)
        return s.lin(x)

    def operators_that_write(s: Any, x: Tensor) -> Any:
        y = x.clone()
        torch.ops.traced.bump(y)
        torch.ops.traced.bump(s.state)
        return s.lin(y) + s.state


FEATURES = {name: function for name, function in vars(Features).items() if callable(function)}


@cache
def captured(function: Callable[..., Any]) -> graphs.Captured:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    (found,) = graphs.capture(Case(function), lambda forward: forward(x))
    return found


def run(gm: GraphModule, inputs: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the inputs as they are then."""
    given = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    torch.manual_seed(0)
    with torch.no_grad():
        results = gm(*given)
    return list(results), given


@pytest.mark.parametrize("name", FEATURES)
def test_a_functional_graph_computes_the_same_and_writes_to_inputs_alone_at_its_end(name: str) -> None:
    found = captured(FEATURES[name])
    NOTES.clear()
    expected = run(found.gm, found.inputs)
    times, gm = len(NOTES), trace(found.gm)
    torch.testing.assert_close(run(gm, found.inputs), expected, rtol=0, atol=0)
    assert len(NOTES) == 2 * times
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    writes = [node for node in nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False)]
    assert all(target_name(node) == "copy_" and node.args[0].op == "placeholder" for node in writes)
    assert nodes[len(nodes) - len(writes) :] == writes


def test_inputs_that_are_written_to_are_known() -> None:
    names = {node.name for node in mutated_inputs(trace(captured(Features.buffers_written).gm).graph)}
    assert {"count" in name or "state" in name for name in names} == {True} and len(names) == 2


def test_names_lines_and_inputs_are_dynamos() -> None:
    def function(s: Any, x: Tensor) -> Any:
        hidden = s.lin(x).view(1, 2, 1, 8)
        attended = F.scaled_dot_product_attention(hidden, hidden, hidden)
        return attended.exp()

    gm = captured(function).gm
    functional = trace(gm)
    assert [node.name for node in placeholders(functional.graph)] == [
        node.name for node in placeholders(gm.graph)
    ]
    (attention,) = [node for node in functional.graph.nodes if node.target is SDPA]
    assert attention.name == "attended" and "scaled_dot_product_attention" in source_of(attention)


def test_two_inputs_of_one_memory_are_refused_where_one_is_written_to() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.mul_(2)
            return x + y

    base = torch.ones(4, 8)
    (found,) = graphs.capture(Module(), lambda forward: forward(base[:2], base[1:3]))
    with pytest.raises(TraceError, match="same memory"):
        trace(found.gm)


NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[:, 0:],
    "to its size": lambda x: x[:, : x.shape[1]],
    "view": lambda x: x.view(2, 8),
    "expand": lambda x: x.expand(2, -1),
    "reshape": lambda x: x.reshape(-1, 8),
    "cast": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "dropout": lambda x: F.dropout(x, 0.1, False),
    "ellipsis": lambda x: x[..., :8],
    "squeeze": lambda x: x.squeeze(0),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_changes_nothing_is_gone(name: str) -> None:
    gm = captured(lambda s, x: NOTHING[name](x).exp()).gm
    assert [target_name(node) for node in trace(gm).graph.nodes if node.op == "call_function"] == ["exp"]


@pytest.mark.parametrize(
    ("equation", "shapes", "is_product"),
    [
        ("b h i d, b h j d -> b h i j", [(2, 3, 4, 5), (2, 3, 6, 5)], True),
        ("b h i j, b h j d -> b h i d", [(2, 3, 4, 6), (2, 3, 6, 5)], True),
        ("b h i d, b j d -> b h i j", [(2, 3, 4, 5), (2, 6, 5)], True),
        ("bhij,bjd->bhid", [(2, 3, 4, 6), (2, 6, 5)], True),
        ("b i h d, b j h d -> b h i j", [(2, 4, 3, 5), (2, 6, 3, 5)], True),
        ("b h i j, b j h d -> b i h d", [(2, 3, 4, 6), (2, 6, 3, 5)], True),
        ("b s h d, b t h d -> b s h t", [(2, 4, 3, 5), (2, 6, 3, 5)], True),
        ("b h i d, b h j d -> b h j i", [(2, 3, 4, 5), (2, 3, 6, 5)], True),
        ("h b i d, b h j d -> h b i j", [(3, 2, 4, 5), (2, 3, 6, 5)], True),
        ("b s h d, h d c -> b s h c", [(2, 4, 3, 5), (3, 5, 6)], True),
        ("i j, j k -> i k", [(4, 3), (3, 5)], True),
        ("...ij,...jk->...ik", [(2, 4, 3), (2, 3, 5)], False),
        ("b i j, b j i -> b", [(2, 4, 3), (2, 3, 4)], False),
        ("b i j, b k l -> b i k", [(2, 4, 3), (2, 5, 6)], False),
        ("b h i d, b h j d -> b h i", [(2, 3, 4, 5), (2, 3, 6, 5)], False),
    ],
)
def test_einsum_of_an_attention_is_a_product_and_others_stay_right(
    equation: str, shapes: list[tuple[int, ...]], is_product: bool
) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    function = graphs.FunctionModule(lambda *sides: torch.einsum(equation, *sides))
    (found,) = graphs.capture(function, lambda forward: forward(*inputs))
    gm = trace(found.gm)
    torch.testing.assert_close(gm(*found.inputs)[0], torch.einsum(equation, *inputs))
    # PyTorch's own products have a dimension for each letter.
    dims = [len(shape_of(node) or ()) for node in gm.graph.nodes]
    assert not is_product or max(dims) <= max(map(len, shapes))


def test_lanes_are_had_of_a_slice_that_is_written_to_its_end() -> None:
    def function(s: Any, x: Tensor) -> Any:
        y = s.lin(x)
        y[1:] += y[:1]
        return y

    found = captured(function)
    gm = trace(found.gm)
    on_lanes = [0 if value.shape == (2, 8) else None for value in found.inputs]
    lanes = [
        torch.stack([each, 2 * each]) if on == 0 else each
        for each, on in zip(found.inputs, on_lanes, strict=True)
    ]
    result = torch.vmap(lambda *inputs: gm(*inputs)[0], in_dims=tuple(on_lanes))(*lanes)
    doubled = [2 * each if on == 0 else each for each, on in zip(found.inputs, on_lanes, strict=True)]
    torch.testing.assert_close(result, torch.stack([gm(*found.inputs)[0], gm(*doubled)[0]]))


def test_a_traced_value_asks_for_no_number() -> None:
    """The newest 7 of n + 1 tokens: is that contiguous? Only where n + 1 is 7, which would be a graph of its own."""

    class Newest(nn.Module):
        def forward(self, past: Tensor, new: Tensor) -> Tensor:
            return torch.cat([past, new], -2)[:, :, -7:]

    past = torch.randn(2, 2, 6, 4)
    torch._dynamo.maybe_mark_dynamic(past, 2)
    found: list[Any] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        env = next(
            each.fake_mode.shape_env
            for each in map(value_of, placeholders(gm.graph))
            if isinstance(each, Tensor)
        )
        before = len(env.guards)
        trace(gm)
        found.append([guard.expr for guard in env.guards[before:]])
        return gm.forward

    torch.compile(Newest(), backend=backend)(past, torch.randn(2, 2, 1, 4))
    assert found == [[]]

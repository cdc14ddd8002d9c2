"""The decode graph is compiled layer by layer, each kind of layer once; a prompt is not compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import build
from torch._inductor import compile_fx
from torch.fx import Graph, GraphModule

import specache_fx
from specache_fx.compiled import uncompiled
from specache_fx.runners import layer_parts
from specache_fx.runtime import ops  # noqa: F401  (defines the operators)
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.steps.step_table import empty_state

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LAYERS = 5  # the least whose parts are more often alike than not


class Inductor:
    """In Inductor's place, or before it: notes what it is given to compile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products: list[int] = []  # by graph
        self.compiles, self._usual = False, compile_fx.compile_fx
        monkeypatch.setattr(compile_fx, "compile_fx", self)

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Any:
        self.products.append(sum(node.target is torch.ops.aten.mm.default for node in gm.graph.nodes))
        return self._usual(gm, inputs) if self.compiles else gm.forward


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Inductor:
    return Inductor(monkeypatch)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(1, 64, (2, count), generator=torch.Generator().manual_seed(0))


def decode(model: Any, steps: int = 12, padding: int = 0, **options: Any) -> tuple[torch.Tensor, Any]:
    """Logits of a prompt of 28 tokens and of steps, and the stats."""
    torch._dynamo.reset()
    given = {"group_size": 16, "residual_length": 16, "top_k": 4, "prompts": "traced"} | options
    specache_fx.compile(model, **given)
    ids = tokens(28 + steps)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    with torch.no_grad():
        given = {"attention_mask": mask[:, :28]} if padding else {}
        out = model(ids[:, :28], use_cache=True, **given)
        logits = [out.logits]
        for i in range(28, 28 + steps):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits)
    return torch.cat(logits, 1), specache_fx.stats(out.past_key_values)


# The first part, those between two layers, and the last. Gemma's second one computes what later ones read. Llama's
# prompt has no mask.
@pytest.mark.parametrize(
    ("name", "layers", "masks", "forms"),
    nightly_unless(
        lambda case: case[0] == "plain",
        [("plain", LAYERS, 1, 3), ("llama", LAYERS, 0, 3), ("gemma3_text", 8, 1, 4)],
    ),
)
def test_layers_that_are_alike_are_compiled_once_and_replayed(
    name: str, layers: int, masks: int, forms: int, inductor: Inductor
) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 4} if name == "gemma3_text" else {}
    make = partial(build, name, num_hidden_layers=layers, **kinds)
    inductor.compiles = True
    logits, stats = decode(make())
    assert len(inductor.products) == masks + forms  # of the prompt its masks alone
    assert stats.replayed_steps >= 10
    inductor.compiles = False
    whole, _ = decode(make(), replay=False)
    assert len(inductor.products) == 2 * masks + forms + 1
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


def test_a_model_whose_first_feed_forward_needs_no_attention_is_cut_too(inductor: Inductor) -> None:
    model = build("plain", 8, is_parallel=True)
    logits, _ = decode(model, 2, top_k=64)
    assert 1 < len(inductor.products) - 1 < 6
    with torch.no_grad(), uncompiled(model):
        torch.testing.assert_close(logits, model(tokens(30)).logits, atol=1e-4, rtol=1e-4)


def of_layers(*factors: float | torch.Tensor) -> tuple[GraphModule, list[torch.Tensor]]:
    """A graph with a layer's step behind each factor."""
    graph_ops.load()
    root, graph, state = torch.nn.Module(), Graph(), empty_state(len(factors))
    inputs = [torch.randn(1, 1, 2, 1, 4), state]
    x, given = (graph.placeholder(name) for name in ("x", "state"))
    for node, value in zip((x, given), inputs, strict=True):
        node.meta["val"] = value
    for layer, factor in enumerate(factors):
        by: Any = factor
        if isinstance(factor, torch.Tensor):
            root.register_buffer(f"constant_{layer}", factor)
            by = graph.create_node("get_attr", f"constant_{layer}")
        x = graph.call_function(torch.ops.aten.mul.Tensor, (x, by))
        x.meta["val"] = inputs[0]
        step = torch.ops.specache.layer_step.default
        x = graph.call_function(step, (x, x, x, given, layer, 1.0))
        x.meta["val"] = inputs[0]
    graph.output((x,))
    return GraphModule(root, graph), inputs


def test_parts_that_differ_in_a_number_are_not_alike() -> None:
    def compile_part(part: GraphModule, examples: Any) -> Any:
        assert all(each.shape == inputs[0].shape for each in examples)
        compiled.append(part)
        return part.forward

    for factors, parts in (((2.0, 2.0, 2.0), 1), ((2.0, 3.0, 3.0, 2.0, 2.0), 2), ((2.0, 3.0, 4.0), 0)):
        compiled: list[GraphModule] = []
        graph, inputs = of_layers(*factors)
        found = layer_parts.compile_by_layer(graph, inputs, compile_part)
        assert len(compiled) == parts
        assert (found is None) == (parts == 0)
    graph, inputs = of_layers(2.0, 2.0, 2.0, 2.0)
    first = next(node for node in graph.graph.nodes if node.op == "call_function")
    first.target = torch.ops.aten.mul_.Tensor  # who reads the input afterwards is told by the order alone
    assert layer_parts.compile_by_layer(graph, inputs, compile_part) is None


def test_a_tensor_that_the_graph_holds_is_an_input_of_a_part() -> None:
    graph, (x, state) = of_layers(*(torch.tensor(float(i)) for i in range(4)))
    parts: list[GraphModule] = []
    found = layer_parts.compile_by_layer(
        graph, [x, state], lambda part, examples: (parts.append(part), part.forward)[1]
    )
    assert found is not None and len(parts) == 1


@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_prompt_is_compiled_where_that_is_asked_for(really: bool, inductor: Inductor) -> None:
    inductor.compiles = really
    expected, _ = decode(build("plain", 1), 0, padding=5)
    assert inductor.products == [0]  # the tests of its masks alone
    logits, _ = decode(build("plain", 1), 0, padding=5, compile_prefill=True)
    assert inductor.products[1] > 6 - 1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    inductor.products.clear()
    specache_fx.explain(build("plain", 1), options={"compile_prefill": True})
    assert inductor.products == []


def test_a_prompt_whose_attention_is_spelt_out_is_compiled(inductor: Inductor) -> None:
    decode(build("llama", attn_implementation="eager"), 0)
    assert len(inductor.products) == 1 and inductor.products[0] > 2 * 7 - 1


class WritesItsMask(torch.nn.Module):
    """A mask that is written in place before the layers, or after the first, and is read besides."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.embed, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)
        self.sides = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(3))

    def forward(self, ids: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        hidden, past = self.embed(ids), []
        places = torch.arange(ids.shape[1])
        seen = (places <= places[:, None]) & real[:, None, None, :]
        mask = torch.zeros(len(ids), 1, *seen.shape[2:]).masked_fill(~seen, -torch.inf)
        if self.when == "before":
            mask[..., 3:9] -= 1.5
        for layer, side in enumerate(self.sides):
            q, k, v = side(hidden).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind()
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
            hidden = hidden + out.transpose(1, 2).flatten(2)
            past.append((k, v))
            if layer == 0 and self.when == "after":
                mask += hidden.mean()
        return self.head(hidden + mask.clamp_min(-9)[:, 0, :, 8:9]), past


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usefixtures("inductor")
def test_a_mask_that_is_written_in_place_stays_in_its_graph(when: str) -> None:
    torch.manual_seed(0)
    module = WritesItsMask(when).eval()
    ids = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, 24, dtype=torch.bool)
    real[0, :6] = False
    options = {"group_size": 16, "residual_length": 16, "top_k": 4}
    compiled = torch.compile(module, backend="specache", options=options)
    with torch.no_grad():
        expected, logits = module(ids, real)[0], compiled(ids, real)[0]
    torch.testing.assert_close(logits[real], expected[real], atol=1e-5, rtol=1e-5)

"""Decode steps that are traced without Dynamo: the answers are the same, and no graph outlives what it was made of."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import nightly_unless
from support.counts import num_graphs
from support.zoo import NAMES, SMALL, WINDOWED_NAMES, build, left_padded
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import activations
from transformers.models.llama import modeling_llama

import specache_fx
from specache_fx.direct import model_state
from specache_fx.direct.direct_trace import trace_step
from specache_fx.direct.model_state import ModelState, reason_against

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
IDS = torch.arange(3, 40)[None]
LOW = {**SMALL, "bits": 2}


def compiled(name: str = "llama", **options: Any) -> Any:
    counters.clear()
    return specache_fx.compile(build(name), **{**SMALL, "bits": 16, **options})


def by_dynamo(model: Any) -> Any:
    model._compiled_call_impl._direct.runner_of = lambda *_: None
    return model


def num_direct() -> int:
    return counters["specache"]["direct_steps"]


def steps(model: Any, past: Any, count: int = 3, **given: Any) -> Tensor:
    """Logits of some tokens."""
    return torch.stack([model(IDS[:, i : i + 1], past_key_values=past, **given).logits for i in range(count)])


@torch.no_grad()
def prompt(model: Any) -> Any:
    return model(IDS, use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("name", "lookahead"),
    nightly_unless(
        (
            *((name, "auto") for name in ("gemma3_text", "mixtral", "lfm2")),
            ("llama", "token"),
        ).__contains__,
        itertools.product((*NAMES, *WINDOWED_NAMES, "bloom", "lfm2"), ("auto", "token")),
    ),
)
def test_answers_are_those_of_dynamos_graphs(name: str, lookahead: str) -> None:
    given = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options = {**LOW, "lookahead": lookahead}
    for batch in (left_padded((23,)), left_padded((23, 9))):
        expected = by_dynamo(compiled(name, **options)).generate(**batch, **given)
        assert not num_direct()
        found = compiled(name, **options).generate(**batch, **given)
        assert num_direct() and not counters["stats"]["unique_graphs"]
        assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


@torch.no_grad()
def test_a_graph_serves_all_lengths_and_batches() -> None:
    model, plain = compiled(), build("llama")
    for rows in (2, 3, 5):
        ids, past = IDS[:, : 20 + rows].repeat(rows, 1), None
        for _ in range(4):
            out = model(ids, past_key_values=past, use_cache=True)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    assert num_graphs() == num_direct() == 1
    past = prompt(model)
    expected = prompt(plain)
    torch.testing.assert_close(steps(model, past), steps(plain, expected), atol=1e-5, rtol=1e-5)
    assert num_graphs() == num_direct() == 2  # one row


@torch.no_grad()
def test_states_of_linear_attention_follow_beams_and_other_caches() -> None:
    model, plain = compiled("lfm2"), build("lfm2")
    prompts = left_padded((20, 13))
    given: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 15, "do_sample": False}
    assert torch.equal(model.generate(**prompts, **given), plain.generate(**prompts, **given))
    caches = [[prompt(each), each(IDS[:, 9:], use_cache=True).past_key_values] for each in (model, plain)]
    found = [
        torch.cat([steps(each, past, 1) for past in 2 * pasts])
        for each, pasts in zip((model, plain), caches, strict=True)
    ]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert num_graphs() == num_direct() == 2  # several rows, and one


@torch.no_grad()
def test_a_step_behind_states_that_are_not_there_yet_is_another() -> None:
    model, plain = compiled("lfm2"), build("lfm2")
    pasts = [prompt(each) for each in (model, plain)]
    steps(model, pasts[0]), steps(plain, pasts[1])
    for past in pasts:
        for layer in past.layers:
            if hasattr(layer, "has_previous_state"):
                layer.has_previous_state = dict.fromkeys(layer.has_previous_state, False)
    torch.testing.assert_close(steps(model, pasts[0]), steps(plain, pasts[1]), atol=1e-5, rtol=1e-5)


# What a graph was made of, changed: the next step has another answer, and it is the plain model's. ------------------


def _eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def _scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.01


def _weight(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.up_proj.weight = nn.Parameter(layer.up_proj.weight * 3)


def _weight_in_place(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.mul_(3)


def _child(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def _layer(model: Any) -> None:
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)


def _hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * 2)


def _pre_hook(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _method(model: Any) -> None:
    model.model.norm.forward = lambda x: x * 2


class TwiceMLP(modeling_llama.LlamaMLP):
    """Another forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice."""
        return 2 * super().forward(x)


def _class(model: Any) -> None:
    model.model.layers[0].mlp.__class__ = TwiceMLP


def _empty_dict(model: Any) -> None:
    model.model.layers[0].mlp.up_proj._forward_hooks[7] = lambda module, args, out: out * 2


def _transposed(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t()


def _config(model: Any) -> None:
    model.config._attn_implementation = "eager"
    model.model.layers[0].self_attn.scaling = 0.02


def _buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 2


def _factor(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 2.0


def _own_forward(model: Any) -> None:
    usual = model.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    model.forward = twice


CHANGES: tuple[Callable[[Any], None], ...] = (
    *(_eps, _scaling, _weight, _weight_in_place, _child, _layer, _hook, _pre_hook, _method, _config),
    *(_buffer, _factor, _class, _empty_dict, _transposed, _own_forward),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__[1:])
@torch.no_grad()
def test_a_changed_model_has_its_own_answers(change: Callable[[Any], None]) -> None:
    model, plain = compiled(), build("llama")
    past, expected = prompt(model), prompt(plain)
    before = steps(model, past)
    torch.testing.assert_close(before, steps(plain, expected), atol=1e-5, rtol=1e-5)
    assert num_direct() == 1
    change(model)
    change(plain)
    found = steps(model, past)
    torch.testing.assert_close(found, wanted := steps(plain, expected), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(wanted, before, atol=1e-2)  # it changes answers


@pytest.mark.parametrize("owner", ["class", "class of torch", "file", "torch", "registry"])
@torch.no_grad()
def test_replaced_code_runs(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = compiled(), build("llama")
    past, expected = prompt(model), prompt(plain)
    steps(model, past), steps(plain, expected)
    if owner == "class":
        usual = modeling_llama.LlamaMLP.forward
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: usual(self, x) * 3)
    elif owner == "class of torch":
        cls = type(model.model.layers[0].mlp.act_fn)
        assert cls is activations.ACT2FN["silu"].__class__
        monkeypatch.setattr(cls, "forward", lambda self, x: x)
    elif owner == "file":
        rotate = modeling_llama.rotate_half
        monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -2 * rotate(x))
    elif owner == "registry":
        usual = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

        def other(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            return usual(module, 2 * query, *args, **kwargs)

        monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", other)
    else:
        monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: 2 * (x @ weight.mT))
    torch.testing.assert_close(steps(model, past), steps(plain, expected), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_functions_of_users_run_by_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = [1.0]
    usual = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out, weights = usual(*args, **kwargs)
        return out * factors[0], weights

    rotate, mlp = modeling_llama.rotate_half, modeling_llama.LlamaMLP.forward

    @functools.wraps(mlp)
    def wrapped(self: nn.Module, x: Tensor) -> Tensor:
        return mlp(self, x) * factors[0]

    for kind in ("attention", "file", "class", "activation"):
        factors[0] = 1.0
        model, plain = compiled(), build("llama")
        monkeypatch.undo()
        if kind == "attention":
            monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", scaled)
        elif kind == "file":
            monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: rotate(x) * factors[0])
        elif kind == "class":
            monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", wrapped)
        else:
            for each in (model, plain):
                del each.model.layers[0].mlp.act_fn
                each.model.layers[0].mlp.act_fn = lambda x: x * factors[0]
        past, expected = prompt(model), prompt(plain)
        steps(model, past), steps(plain, expected)
        factors[0] = 3.0
        torch.testing.assert_close(steps(model, past), steps(plain, expected), atol=1e-4, rtol=1e-4)
        assert not num_direct()


@torch.no_grad()
def test_an_attention_that_others_use_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "own", lambda *_: None)
    model = compiled()
    steps(model, prompt(model))
    assert num_direct() == 1


@pytest.mark.parametrize("name", ["opt", "llama"])
@torch.no_grad()
def test_weights_of_another_dtype(name: str) -> None:
    model, plain = compiled(name), build(name)
    steps(model, prompt(model))
    for each in (model, plain):
        for weight in each.parameters():
            weight.data = weight.data.bfloat16()
    found, wanted = steps(model, prompt(model)), steps(plain, prompt(plain))
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)
    assert found.dtype == torch.bfloat16


@torch.no_grad()
def test_a_cache_whose_updates_are_watched_is_updated_once() -> None:
    model, seen = compiled("gemma3_text"), []
    past = prompt(model)
    usual = past.update

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[2])
        return usual(*args, **kwargs)

    past.update = watched
    counts = [int(layer.cumulative_length) for layer in past.layers if layer.is_sliding]
    steps(model, past, 1)
    assert [int(layer.cumulative_length) for layer in past.layers if layer.is_sliding] == [
        count + 1 for count in counts
    ]


@torch.no_grad()
def test_a_number_that_differs_in_each_step_is_left_to_dynamo() -> None:
    model = compiled()
    past = prompt(model)
    for i in range(9):
        model(IDS[:, :1], past_key_values=past, step=i)
    assert 2 <= num_direct() <= 5


@torch.no_grad()
def test_a_hook_of_another_model_or_of_transformers_changes_nothing() -> None:
    model, other = compiled(), build("llama")
    past = prompt(model)
    for _ in range(6):
        steps(model, past, 1)
        other.model.norm.register_forward_hook(lambda *_: None)
    assert num_graphs() == num_direct() == 1
    steps(model, past, 1, output_hidden_states=True)  # by Dynamo; it leaves hooks of transformers'
    dynamos = num_graphs() - num_direct()
    steps(model, past)
    assert (num_graphs() - num_direct(), num_direct()) == (dynamos, 2)


@torch.no_grad()
def test_a_hook_beside_one_of_transformers_runs() -> None:
    model, plain = compiled(), build("llama")
    past, expected = prompt(model), prompt(plain)
    for each, cache in ((plain, expected), (model, past)):
        steps(each, cache, 1, output_hidden_states=True)  # it leaves hooks of transformers'
        steps(each, cache, 1)
        assert each.model.layers[1]._forward_hooks
        each.model.layers[1].register_forward_hook(lambda module, args, out: out.flip(-1))
    assert num_direct() == 1
    torch.testing.assert_close(steps(model, past), steps(plain, expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__[1:])
@torch.no_grad()
def test_a_torch_without_versions_of_dicts_and_guards_of_tensors(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_state, "_dict_version", None)
    monkeypatch.setattr(model_state, "_Forms", model_state._PlainForms)
    model = build("llama")
    state = ModelState(model)
    assert state.is_same()
    change(model)
    assert state.is_same() is (change is _weight_in_place)  # the graph reads its numbers


@torch.no_grad()
def test_one_number_that_is_replaced_is_another_weight() -> None:
    owner = nn.Linear(1, 1).eval()
    state = ModelState(owner)
    assert state.is_same()
    owner.weight = nn.Parameter(owner.weight.clone())
    assert not state.is_same()


@torch.no_grad()
def test_arguments_without_dimensions() -> None:
    model, plain = compiled(), build("llama")
    given = {"logits_to_keep": torch.tensor(0)}
    found, wanted = steps(model, prompt(model), **given), steps(plain, prompt(plain), **given)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_two_models_of_a_class_have_graphs_of_their_own() -> None:
    one, two = compiled(), compiled()
    plain = build("llama")
    for model in (two, plain):
        for layer in model.model.layers:
            layer.input_layernorm.variance_epsilon = 0.3
    steps(one, prompt(one))
    torch.testing.assert_close(steps(two, prompt(two)), steps(plain, prompt(plain)), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_model_that_changes_without_end_is_left_to_dynamo() -> None:
    model = compiled()
    past = prompt(model)
    for i in range(9):
        model.model.layers[0].self_attn.scaling = 0.1 + i
        steps(model, past, 1)
    assert 2 <= num_direct() <= 5  # some are traced, and not all


class Counts(nn.Module):
    """Code of a user, which does something that no tensor shows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        """Count."""
        self.calls += 1
        return self.inner(x)


@torch.no_grad()
def test_code_of_users_runs_by_dynamo() -> None:
    model = compiled()
    model.model.norm = Counts(model.model.norm)
    assert "neither torch nor transformers" in str(reason_against(model))
    past = prompt(model)
    assert model.model.norm.calls == 1
    steps(model, past, 4)
    assert model.model.norm.calls == 5 and not num_direct()


def test_hooks_train_mode_and_subclasses_are_dynamos() -> None:
    for change, reason in (
        (lambda model: model.train(), "training"),
        (lambda model: model.lm_head.register_forward_hook(lambda *_: None), "hooks"),
        (lambda model: setattr(model.lm_head, "forward", lambda x: x), "neither"),
        (lambda model: setattr(model.lm_head, "other", nn.Linear(2, 2).forward), "functions of neither"),
    ):
        model = build("llama")
        assert reason_against(model) is None
        change(model)
        assert reason in str(reason_against(model))


@torch.no_grad()
def test_a_trace_leaves_the_model_and_its_cache_as_they_are() -> None:
    model = compiled()
    past = prompt(model)
    module, cache = model, past
    before, layers = ModelState(module), [dict(vars(layer)) for layer in cache.layers]
    given = {"input_ids": IDS[:, :1], "past_key_values": cache, "use_cache": True}
    graph = trace_step(module, given, 1).graph
    assert before.is_same() and graph.graph.find_nodes(
        op="call_function", target=torch.ops.specache.scaled_dot_product_attention.default
    )
    for layer, then in zip(cache.layers, layers, strict=True):
        assert all(vars(layer)[name] is value for name, value in then.items())


@torch.no_grad()
def test_outputs_have_their_form() -> None:
    model, plain = compiled(), build("llama")
    past, expected = prompt(model), prompt(plain)
    for given in ({}, {"return_dict": False}, {"output_hidden_states": True}, {"use_cache": True}):
        found = model(IDS[:, :1], past_key_values=past, **given)
        wanted = plain(IDS[:, :1], past_key_values=expected, **given)
        assert type(found) is type(wanted) and len(found) == len(wanted)
        cache = found[1] if isinstance(found, tuple) else found.past_key_values
        assert cache is past
        if given.get("output_hidden_states"):
            for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_modes_have_graphs_of_their_own() -> None:
    model, plain = compiled(), build("llama")
    past, expected = prompt(model), prompt(plain)
    steps(model, past), steps(plain, expected)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = steps(model, past, 1), steps(plain, expected, 1)
        assert found.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)
    with torch.inference_mode():
        steps(model, past, 1), steps(plain, expected, 1)
    torch.testing.assert_close(steps(model, past), steps(plain, expected), atol=2e-2, rtol=2e-2)


@torch.no_grad()
def test_a_stance_of_dynamos_holds() -> None:
    model = compiled()
    past = prompt(model)
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="fail_on_recompile"),
    ):
        steps(model, past, 1)
    steps(model, past, 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        steps(model, past, 1)
    assert num_graphs() == num_direct() == 1


@torch.no_grad()
@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_waits_for_a_compile(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, collected = compiled(), list[bool]()
    past = prompt(model)

    def note(*given: Any) -> Any:
        collected.append(gc.isenabled())
        return trace_step(*given)

    monkeypatch.setattr("specache_fx.direct.direct_step.trace_step", note)
    if not collects:
        gc.disable()
    try:
        steps(model, past, 1)
        assert collected == [False] and gc.isenabled() is collects
    finally:
        gc.enable()


@torch.no_grad()
def test_a_reset_forgets_graphs() -> None:
    model = compiled()
    past = prompt(model)
    steps(model, past, 1)
    torch.compiler.reset()
    steps(model, past, 1)
    assert num_direct() == 2

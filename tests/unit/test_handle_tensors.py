"""Handles outside of compiled graphs: nothing reads or changes one there, and whoever tries is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import SMALL, TWO_LANES, build, left_padded
from torch import Tensor, nn

import specache_fx
from specache_fx import CacheHandleError, UnsupportedGraphError
from specache_fx.compiled import uncompile, uncompiled
from specache_fx.runtime.handles.handle_tensor import Handle, plain
from specache_fx.runtime.session import registry

IDS = left_padded((12, 12, 12))["input_ids"]
OUTSIDE = "outside of a graph that specache compiled"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch._dynamo.reset()
    return specache_fx.compile(build("plain"), **SMALL, bits=16)


@torch.no_grad()
def prompt(model: Any) -> Any:
    return model(IDS, use_cache=True).past_key_values


@torch.no_grad()
def step(model: Any, past: Any) -> Tensor:
    return model(torch.full((3, 1), 5), past_key_values=past, use_cache=True).logits


def second_turn(model: Any, past: Any) -> Tensor:
    query = torch.cat([IDS, torch.full((3, 1), 5)], dim=1)
    return model.generate(input_ids=query, past_key_values=past, max_new_tokens=8, do_sample=False)


# What generate() calls ------------------------------------------------------------------------------------------------


def peft_model() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(build("plain", 1), config).eval()


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "torch.compile"])
def test_generate_of_a_peft_model_goes_on_with_a_cache_of_a_call(wrapped: bool, fresh_dynamo: None) -> None:
    uncompiled, compiled = peft_model(), peft_model()
    if wrapped:
        compiled = torch.compile(compiled, backend="specache", options={**SMALL, "bits": 16})
        specache_fx.compile(compiled)
    else:
        specache_fx.compile(compiled, **SMALL, bits=16)
    past = prompt(compiled)
    tokens = second_turn(compiled, past)
    assert torch.equal(tokens, second_turn(uncompiled, prompt(uncompiled)))
    assert specache_fx.stats(past).steps == 8  # `generate` ran compiled


@pytest.mark.parametrize("make", [peft_model, lambda: build("plain", 1)], ids=["peft", "plain"])
def test_generate_that_runs_uncompiled_is_refused_a_cache(
    make: Callable[[], Any], fresh_dynamo: None
) -> None:
    compiled = torch.compile(make(), backend="specache", options=SMALL)
    past = prompt(compiled)
    with pytest.raises(CacheHandleError, match=rf"{OUTSIDE}.*specache_fx\.compile\(model\)"):
        second_turn(compiled, past)


def test_a_peft_model_is_uncompiled_with_the_module_inside(fresh_dynamo: None) -> None:
    model = specache_fx.compile(peft_model(), **SMALL, bits=16)
    with uncompiled(model):
        assert not isinstance(prompt(model).layers[0].keys, Handle)
        assert not isinstance(prompt(model.base_model.model).layers[0].keys, Handle)
    assert isinstance(prompt(model.base_model.model).layers[0].keys, Handle)
    assert isinstance(prompt(model).layers[0].keys, Handle)
    uncompile(model)
    assert not isinstance(prompt(model.base_model.model).layers[0].keys, Handle)


def test_explain_follows_a_peft_model_inside(fresh_dynamo: None) -> None:
    said = specache_fx.explain(peft_model(), options={**TWO_LANES, "bits": 16}, input_ids=IDS[:1])
    assert any("2 lanes" in line for line in str(said).splitlines()), str(said)


# Edits ----------------------------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(0),
    "one token": lambda x: x[:, :, 5].zero_(),
    "setitem": lambda x: x.__setitem__((0, 0, 3), 0),
    "masked_fill_": lambda x: x.masked_fill_(torch.arange(x.shape[2])[:, None] < 5, 0),
    "index_fill_": lambda x: x.index_fill_(2, torch.tensor([0]), 0),
    "copy_": lambda x: x.copy_(torch.zeros(x.shape)),
    "init": nn.init.zeros_,
    "data": lambda x: x.data.zero_(),
    "detached": lambda x: x.detach().zero_(),
    "out=": lambda x: torch.zeros(x.shape, out=x),
    "set data": lambda x: setattr(x, "data", torch.zeros(x.shape)),
    "scaled": lambda x: x * 0.5,
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "copy from": lambda x: torch._foreach_copy_([torch.zeros(x.shape)], [x]),
    "typed": lambda x: x.type(torch.bfloat16),
    "cast": lambda x: x.to(torch.bfloat16),
    "appended": lambda x: torch.cat([x, torch.zeros(3, 2, 1, 16)], dim=2),
    "into another": lambda x: torch.zeros(x.shape).copy_(x),
    "read": lambda x: float(x[0, 0, 0, 0]),
    "numpy": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_edits_and_reads_are_refused_where_they_are_called(model: nn.Module, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        past, other = prompt(model), prompt(model)
        for edit in EDITS.values():
            for each in (past, copy.deepcopy(past)):
                with pytest.raises(CacheHandleError, match=OUTSIDE):
                    edit(each.layers[0].keys)
        torch.testing.assert_close(step(model, past), step(model, other))


@torch.no_grad()
def test_an_edit_by_compiled_code_is_refused_by_the_next_call(model: nn.Module) -> None:
    def edit_and_go_on(past: Any) -> None:
        torch.compile(lambda x: x.zero_(), backend="eager")(past.layers[1].values[:, :, :-2])
        step(model, past)

    with pytest.raises(CacheHandleError, match=rf"was edited|{OUTSIDE}"):  # torch 2.11 calls `zero_` itself
        edit_and_go_on(prompt(model))


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": lambda x: x[:, [1, 0]],
    "one twice": lambda x: x[:, [0, 0]],
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 0])),
    "flipped": lambda x: x.flip(1),
    "rolled": lambda x: x.roll(1, 1),
    "repeated": lambda x: x[:, :1].repeat_interleave(2, dim=1),
    "expanded": lambda x: x[:, 1:].expand(-1, 2, -1, -1),
}


@pytest.mark.parametrize("how", nightly_unless("permuted".__eq__, HEADS))
def test_heads_that_were_permuted_or_duplicated_are_refused(model: nn.Module, how: str) -> None:
    for layers in ((0,), (0, 1)):
        past = prompt(model)
        for layer in (past.layers[i] for i in layers):
            layer.keys, layer.values = HEADS[how](layer.keys), HEADS[how](layer.values)
        with pytest.raises(
            CacheHandleError, match=r"was edited|heads of a copy were permuted|several caches"
        ):
            step(model, past)


# What may be done -----------------------------------------------------------------------------------------------------


def test_views_and_copies_of_a_handle_are_handles(model: nn.Module) -> None:
    past = prompt(model)
    keys = past.layers[0].keys
    for made in (
        keys[:, :, :-3],
        keys[[2, 0, 0]],
        keys.clone(),
        copy.deepcopy(keys),
        keys.to("cpu"),
        *keys.chunk(3),
    ):
        assert isinstance(made, Handle) and registry.find(made) is registry.find(keys)
    assert repr(keys) == "Handle(shape=(3, 2, 12, 16), dtype=torch.float32, device='cpu')" == str(keys)
    assert f"{keys}" == repr(keys) and "lease" in dir(keys) and keys.type() == "torch.FloatTensor"
    assert type(torch.zeros_like(keys)) is Tensor and bool((torch.zeros_like(keys) == 0).all())
    assert (keys.shape, keys.dtype, keys.numel(), len(keys)) == ((3, 2, 12, 16), torch.float32, 1152, 3)
    assert plain(keys).isnan().any() and not isinstance(plain(keys), Handle)


# Refusals that Dynamo would swallow -----------------------------------------------------------------------------------


class Squashed(nn.Module):
    """One token attends by a sigmoid, which can't be rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 48), nn.Linear(16, 16)

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        query, keys, values = self.embed(ids)[:, None].chunk(3, dim=-1)
        if past is None:
            out = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
        else:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
            out = torch.sigmoid(query @ keys.transpose(-1, -2)) @ values
        return self.head(out[:, 0]), (keys, values)


@torch.no_grad()
@pytest.mark.parametrize("strict", [True, False])
def test_a_refusal_is_raised_also_under_suppress_errors(strict: bool, fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model = Squashed().eval()
    compiled = torch.compile(model, backend="specache", options={**SMALL, "strict": strict})
    with torch._dynamo.config.patch(suppress_errors=True):
        ids = torch.arange(12)[None]
        _, past = compiled(ids)
        assert isinstance(past[0], Handle)
        if strict:
            for _ in range(2):
                with pytest.raises(UnsupportedGraphError, match=r"softmax|scaled_dot_product"):
                    compiled(torch.tensor([[3]]), past)
        else:
            logits, _ = compiled(torch.tensor([[3]]), past)
            torch.testing.assert_close(logits, model(torch.tensor([[3]]), model(ids)[1])[0])

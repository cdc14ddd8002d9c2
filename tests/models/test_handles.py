"""Handles: small, poisonous to whoever reads them as numbers, traceable through copies, freed with their session."""

from __future__ import annotations

import copy
import gc
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import nightly_unless
from support.counts import num_graphs
from support.zoo import SMALL, build, left_padded
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from transformers import DynamicCache

import specache_fx
from specache_fx import CacheHandleError
from specache_fx.runtime.handles import handle
from specache_fx.runtime.handles.handle_tensor import bare, plain
from specache_fx.runtime.session import registry

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
PROMPT = left_padded()
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch._dynamo.reset()
    model = build("plain")
    model.compile(backend="specache", options={**SMALL, "bits": 2})
    return model


@pytest.fixture(scope="module")
def exact_model() -> nn.Module:
    model = build("plain", 1)
    model.compile(backend="specache", options={**SMALL, "bits": 16})
    return model


def generate(model: nn.Module, new_tokens: int = 30) -> Any:
    return model.generate(**PROMPT, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)


@torch.no_grad()
def step(model: Callable[..., Any], past: Any, token: int = 5) -> Tensor:
    return model(torch.full((3, 1), token), past_key_values=past, use_cache=True).logits


def pairs(past: Any) -> list[Tensor]:
    return [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]


def branch_of(past: Any) -> Any:
    """A cache with the tensors that another has now."""
    branch = copy.copy(past)
    branch.layers = [copy.copy(layer) for layer in past.layers]
    return branch


@pytest.fixture(scope="module")
def generated(model: nn.Module) -> Any:
    """A cache that no call goes on with: tests take `branch_of` it, and are refused."""
    return generate(model).past_key_values


# What a cache says about itself -------------------------------------------------------------------------------------


@torch.no_grad()
def test_length_is_right_after_every_step(model: nn.Module) -> None:
    out = model(PROMPT["input_ids"], use_cache=True)
    for kv_len in range(12, 40):
        assert out.past_key_values.get_seq_length() == kv_len == specache_fx.stats(out.past_key_values).kv_len
        assert all(tensor.shape == (3, 2, kv_len, 16) for tensor in pairs(out.past_key_values))
        assert all(tensor.size(-2) == tensor.size(dim=-2) == kv_len for tensor in pairs(out.past_key_values))
        out = model(torch.full((3, 1), 7), past_key_values=out.past_key_values, use_cache=True)
    out = model(torch.full((3, 6), 7), past_key_values=out.past_key_values, use_cache=True)
    assert out.past_key_values.get_seq_length() == 46


def test_returned_cache_takes_next_to_nothing(generated: Any) -> None:
    past = generated
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in pairs(past)}
    # One storage: a row of head_dim floats for each of the 4 slots and 3 batch rows, and a ruler of a float a token.
    assert len(storages) == 1 and sum(storages.values()) <= 4 * (4 * 3 * 16 + 41 + 2 * 512)
    stats = specache_fx.stats(past)
    assert stats.full_bytes == 41 * 4 * 3 * 2 * 16 * 4
    assert stats.device_ratio == stats.device_bytes / stats.full_bytes


# Nobody reads a handle as numbers -----------------------------------------------------------------------------------


def assert_refused(run: Callable[[], Tensor]) -> None:
    with pytest.raises(CacheHandleError, match="outside of a graph that specache compiled"):
        run()


def assert_never_finite(run: Callable[[], Tensor]) -> None:
    try:
        logits = run()
    except CacheHandleError:
        return
    assert logits.isnan().all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_attention_is_refused_a_handle(generated: Any, attention: str) -> None:
    model = build("llama", attn_implementation=attention)
    assert_refused(lambda: step(model, branch_of(generated)))


def test_force_eager_is_refused_a_handle(model: nn.Module, generated: Any) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert_refused(lambda: step(model, branch_of(generated)))


def test_another_compiler_gets_no_numbers_from_a_handle(generated: Any) -> None:
    assert_never_finite(lambda: step(torch.compile(build("plain"), backend="eager"), branch_of(generated)))


class Sigmoid(nn.Module):
    """Attention without a softmax."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([keys, x], dim=2), torch.cat([values, 2 * x], dim=2)
        return torch.sigmoid(x @ keys.transpose(-1, -2)) @ values, keys, values


def attended(model: nn.Module, past: Any, layer: int) -> Tensor:
    cached = past.layers[layer]
    return model(torch.ones(3, 2, 1, 16), cached.keys, cached.values)[0]


@torch.no_grad()
def test_graph_that_is_left_alone_gets_the_numbers_of_a_handle(
    exact_model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    past, plain = generate(exact_model).past_key_values, generate(build("plain", 1)).past_key_values
    other = torch.compile(Sigmoid(), backend="specache", options=SMALL)
    torch.testing.assert_close(attended(other, past, 0), attended(Sigmoid(), plain, 0), **CLOSE)
    assert "gives a KV cache back" in caplog.text and "scaled_dot_product_attention there" in caplog.text


@torch.no_grad()
def test_graph_that_is_left_alone_refuses_a_part_of_another_length(generated: Any) -> None:
    past = branch_of(generated)
    past.crop(-3)
    other = torch.compile(Sigmoid(), backend="specache", options=SMALL)
    with pytest.raises(
        CacheHandleError, match=r"one call back as the model returned it.*scaled_dot_product_attention there"
    ):
        attended(other, past, 0)


@pytest.mark.parametrize("copied", [False, True], ids=["own", "copy"])
def test_numbers_of_an_earlier_length_are_read_and_the_cache_goes_on(
    exact_model: nn.Module, copied: bool
) -> None:
    def logits(model: nn.Module) -> Tensor:
        past = generate(model).past_key_values
        older = branch_of(past)
        found = [step(model, past, 5)]
        # With gradients the graph is left alone, and gets numbers.
        older = copy.deepcopy(older) if copied else older
        found.append(model(torch.full((3, 1), 6), past_key_values=older, use_cache=True).logits.detach())
        return torch.cat([*found, step(model, past, 7)])

    torch.testing.assert_close(logits(exact_model), logits(build("plain", 1)), **CLOSE)


@torch.no_grad()
def test_a_part_of_a_branch_that_was_left_is_refused(exact_model: nn.Module) -> None:
    past = generate(exact_model).past_key_values
    branches = [branch_of(past), branch_of(past)]
    for token, branch in enumerate(branches, 5):
        step(exact_model, branch, token)
    other = torch.compile(Sigmoid(), backend="specache", options=SMALL)
    attended(other, branches[1], 0)
    with pytest.raises(CacheHandleError, match="a branch that was left"):
        attended(other, branches[0], 0)


@pytest.mark.parametrize(
    ("cut", "copied"),
    nightly_unless(lambda case: case == (7, True), itertools.product((0, 7), (False, True))),
)
def test_gradients_get_the_numbers_of_a_cache(exact_model: nn.Module, cut: int, copied: bool) -> None:
    def logits(model: nn.Module) -> Tensor:
        with torch.no_grad():
            past = generate(model).past_key_values
        past.crop(-cut) if cut else None
        past = copy.deepcopy(past) if copied else past
        out = [model(torch.full((3, 1), 5), past_key_values=past, use_cache=True).logits]
        with torch.no_grad():  # and goes on with what it got
            out.append(model(torch.full((3, 1), 9), past_key_values=past, use_cache=True).logits)
        return torch.cat(out).detach()

    torch.testing.assert_close(logits(exact_model), logits(build("plain", 1)), **CLOSE)


# Foreign caches -----------------------------------------------------------------------------------------------------


def refused(reason: str) -> Any:
    """By us; or, where keys and values could differ in length, by Dynamo of torch 2.11, which traces `repeat_kv`."""
    expected = (CacheHandleError, TorchRuntimeError)
    return pytest.raises(
        expected, match=f"{reason}|call_function <built-in function scaled_dot_product_attention>"
    )


@pytest.mark.parametrize(
    "other",
    nightly_unless(
        lambda other: "top_k" in other.get("options", {}),
        [{"options": {"bits": 4}}, {"options": {"top_k": 3}}, {"overrides": {"num_hidden_layers": 3}}],
    ),
    ids=str,
)
def test_cache_of_another_compiled_model_is_refused(generated: Any, other: dict[str, dict[str, Any]]) -> None:
    past = branch_of(generated)
    second = build("plain", **other.get("overrides", {}))
    second.compile(backend="specache", options={**SMALL, "bits": 2, **other.get("options", {})})
    if other.get("overrides"):  # its own third layer never saw a prompt
        second_past = generate(second, new_tokens=2).past_key_values
        for mine, theirs in zip(second_past.layers, past.layers, strict=False):
            mine.keys, mine.values = theirs.keys, theirs.values
        past = second_past
    with refused("another|several caches|not of the same tokens|was made with"):
        step(second, past)


def test_layers_of_two_caches_are_refused(model: nn.Module, generated: Any) -> None:
    first = generate(model).past_key_values
    first.layers[1].keys = generated.layers[1].keys
    with pytest.raises(CacheHandleError, match="come from several caches"):
        step(model, first)


def test_cache_of_an_ended_session_is_refused(model: nn.Module) -> None:
    past = generate(model).past_key_values
    for layer in past.layers:
        layer.keys, layer.values = through_a_file(layer.keys), through_a_file(layer.values)
    gc.collect()
    with pytest.raises(CacheHandleError, match="session that has ended"):
        step(model, past)


# Life and death -----------------------------------------------------------------------------------------------------


def test_a_view_of_a_handle_keeps_the_session(model: nn.Module) -> None:
    past = generate(model).past_key_values
    view = past.layers[1].values[:, :, 3:]
    session = registry.find(view)
    del past
    generate(model, new_tokens=2)
    assert session is not None and not session.closed
    assert registry.find(view) is session


def tokens_of(x: Tensor, *tokens: int | range) -> Tensor:
    """A copy of some tokens."""
    every = [each for part in tokens for each in (part if isinstance(part, range) else [part])]
    return x.index_select(2, torch.tensor(every))


# Eviction by hand, as StreamingLLM and H2O do it: no crop, though the first tokens may be the same.
# It can't be served: the pairs that stay have other positions in the session.
CHOICES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "without the oldest": lambda x, n: x[:, :, 1:],
    "without many": lambda x, n: x[:, :, 17:],
    "without two groups": lambda x, n: x[:, :, 16:],
    "without all but one": lambda x, n: x[:, :, 40:],
    "a copy without the oldest": lambda x, n: x[:, :, 1:].clone(),
    "a copy without many": lambda x, n: x[:, :, 17:].clone(),
    "every second": lambda x, n: x[:, :, ::2],
    "a copy of every second": lambda x, n: tokens_of(x, range(0, n, 2)),
    "sinks and the newest": lambda x, n: tokens_of(x, range(4), range(n - 20, n)),
    "many sinks and the newest": lambda x, n: tokens_of(x, range(20), range(n - 20, n)),
    "all but one": lambda x, n: tokens_of(x, range(30), range(31, n)),
    "two swapped": lambda x, n: tokens_of(x, range(32), 33, 32, range(34, n)),
    "one twice": lambda x, n: tokens_of(x, range(n), n - 1),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_tokens_is_refused(model: nn.Module, generated: Any, choice: str) -> None:
    past = branch_of(generated)
    for layer in past.layers:
        layer.keys, layer.values = (CHOICES[choice](x, x.shape[2]) for x in (layer.keys, layer.values))
    reason = r"edited: its elements are not those|claims \d+ tokens"
    if "without" in choice:
        reason = r"oldest tokens|reordered|in use"
    with pytest.raises(CacheHandleError, match=reason):
        step(model, past)


EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: x * 0.5,
    "shifted": lambda x: x + 1,
    "negated": lambda x: -x,
    "clamped": lambda x: x.clamp(-0.5, 0.5),
    "relu": torch.relu,
    "abs": torch.abs,
    "rounded": torch.round,
    "tanh": torch.tanh,
    "averaged": lambda x: torch.lerp(x, x.flip(0), 0.5),
    "mean_of_the_batch": lambda x: x.mean(0, keepdim=True).expand_as(x),
    "weighed_by_token": lambda x: x * torch.linspace(0.5, 1, x.shape[2])[:, None],
    "first_tokens_away": lambda x: x.masked_fill((torch.arange(x.shape[2]) < 5)[:, None], 0.0),
    "some_tokens_away": lambda x: x.masked_fill((torch.arange(x.shape[2]) % 7 == 5)[:, None], 0.0),
    "one_channel_away": lambda x: x.index_fill(3, torch.tensor([5]), 0.0),
    "another_dtype": lambda x: x.bfloat16(),
    "there_and_back": lambda x: x.half().float(),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[3:]),
}


# These leave `Handle`, and some count no version.
ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "copy": lambda x: copy.copy(x).zero_(),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)).zero_(),
    "set": lambda x: torch.empty(0).set_(x).zero_(),
    "numpy": lambda x: plain(x).numpy().fill(0),
}


@pytest.mark.parametrize("how", ALIASES)
@pytest.mark.parametrize("which", [0, -1])
def test_a_cache_that_was_edited_through_another_name_is_refused(
    model: nn.Module, how: str, which: int
) -> None:
    past = generate(model, new_tokens=5).past_key_values
    with pytest.raises(CacheHandleError, match=r"was edited|holds placeholders"):  # noqa: PT012
        ALIASES[how](pairs(past)[which])
        step(model, past)


def test_a_cache_that_is_put_together_anew_is_a_copy(model: nn.Module) -> None:
    past = generate(model, new_tokens=5).past_key_values
    expected = step(model, copy.deepcopy(past))
    again = DynamicCache([(layer.keys, layer.values) for layer in past.layers])
    torch.testing.assert_close(step(model, again), expected, **CLOSE)
    shared = copy.copy(past.layers[0].keys)
    assert shared.data_ptr() == past.layers[0].keys.data_ptr()
    with pytest.raises(CacheHandleError, match="holds placeholders"):
        shared.mul_(2)


def test_an_edited_cache_is_refused(model: nn.Module) -> None:
    """By compiled code, which handles can't refuse. NaN times a half is the same NaN: edits have to show elsewhere."""
    past = generate(model, new_tokens=5).past_key_values
    kept = [(layer.keys, layer.values) for layer in past.layers]
    expected = step(model, copy.deepcopy(past))
    for edit, which in zip(EDITS.values(), itertools.cycle(({0}, {1}, {0, 1})), strict=False):
        for layer, pair in zip(past.layers, kept, strict=True):
            with bare():
                layer.keys, layer.values = (edit(x) if i in which else x for i, x in enumerate(pair))
        with pytest.raises(CacheHandleError, match=r"edited|is no cache of a model|come from several caches"):
            step(model, past)
    for layer, pair in zip(past.layers, kept, strict=True):
        layer.keys, layer.values = pair
    # Nothing is lost. The copy chose its pairs anew: they lie in other slots, and sums have another order.
    torch.testing.assert_close(step(model, past), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_no_stretch_of_a_ruler_comes_twice(dtype: torch.dtype) -> None:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    long = handle.issue(5, [(1, 16)], 1, 200_000, dtype, CPU)[0]
    ruler = long[0, 0, 16:, 0]  # behind the code
    numbers = ruler[7::8]
    assert bool(((numbers >= -4) & (numbers <= -2)).all())  # whatever is computed of it shows
    assert ruler.isnan().sum() == len(ruler) - len(numbers)
    stretches = ruler.view(integer).unfold(0, 16, 1)  # bf16 needs heads of 16
    assert len(stretches.unique(dim=0)) == len(stretches)
    grown = handle.resize(handle.issue(5, [(1, 16)], 1, 99, dtype, CPU), [200_000])[0]
    assert torch.equal(grown.view(integer), long.view(integer))


@torch.no_grad()
def test_the_ruler_grows_in_place(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer handles need more of it: the storage stays the same, older handles too, and nothing is compiled."""
    monkeypatch.setattr(handle, "_SLACK", 8)
    out = model(PROMPT["input_ids"], use_cache=True)
    first = out.past_key_values.layers[0].keys
    storage, began = first.untyped_storage()._cdata, first.untyped_storage().nbytes()
    for i in range(40):
        if i == 3:
            graphs = num_graphs()
        out = model(torch.full((3, 1), 7), past_key_values=out.past_key_values, use_cache=True)
        assert all(plain(x).isnan().any(-1).all() for x in pairs(out.past_key_values))
    newest = out.past_key_values.layers[0].keys
    assert newest.untyped_storage()._cdata == storage and newest.untyped_storage().nbytes() > began
    assert handle.decode(plain(first)) == handle.decode(plain(newest))
    assert num_graphs() == graphs


@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_handle_among_other_tensors_is_found(others: int) -> None:
    numbers = [torch.randn(2, 2, 3, 16), torch.full((2, 2, 3, 16), torch.nan), torch.empty(2, 2, 0, 16)]
    mine = handle.issue(6, [(2, 16)], 2, 3, torch.bfloat16, CPU)[0].clone()
    assert registry.first_handle(numbers * others) is None
    assert registry.first_handle([*numbers * others, mine, *numbers]) is mine


# Codes --------------------------------------------------------------------------------------------------------------


def codes_of(session: int, slot: int, rows: list[int]) -> list[handle.HandleCode]:
    mine = handle.decode(handle.issue(5, [(1, 16)], 1, 1, torch.float32, CPU)[0])
    assert mine is not None
    return [handle.HandleCode(session, slot, row, mine[0].process) for row in rows]


@given(
    session=st.integers(0, handle.MAX_SESSION - 1),
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from((16, 20, 64, 128)),
    batch=st.integers(1, 5),
    kv_len=st.integers(1, 9),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
)
def test_codes_are_read_back(
    session: int, layers: int, heads: int, head_dim: int, batch: int, kv_len: int, dtype: torch.dtype
) -> None:
    issued = handle.issue(session, [(heads, head_dim)] * (2 * layers), batch, kv_len, dtype, CPU)
    longer = handle.resize(issued, [kv_len + 100] * len(issued))
    for slot, tensor in enumerate(issued):
        assert tensor.shape == (batch, heads, kv_len, head_dim) and tensor.dtype == dtype
        assert tensor.isnan().any(-1).all() and not tensor.isnan().all()
        assert handle.decode(tensor) == codes_of(session, slot, list(range(batch)))
        assert handle.decode(longer[slot]) == handle.decode(tensor)


def through_a_file(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


COPIES: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
    "clone": (lambda x: x.clone(), [0, 1, 2]),
    "contiguous": (lambda x: x.contiguous(), [0, 1, 2]),
    "deepcopy": (copy.deepcopy, [0, 1, 2]),
    "save_load": (through_a_file, [0, 1, 2]),
    "index_select": (lambda x: x.index_select(0, torch.tensor([2, 0, 0])), [2, 0, 0]),
    "index": (lambda x: x[torch.tensor([1, 2])], [1, 2]),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=0), [0, 0, 1, 1, 2, 2]),
    "cat": (lambda x: torch.cat([x[1:], x[:1]]), [1, 2, 0]),
    "crop": (lambda x: x[:, :, :-2], [0, 1, 2]),
    "cropped_copy": (lambda x: x[:, :, :-2].contiguous(), [0, 1, 2]),
    "stack": (lambda x: torch.stack(list(x)), [0, 1, 2]),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_survive_a_copy(dtype: torch.dtype, how: str) -> None:
    copied, rows = COPIES[how]
    for slot, tensor in enumerate(handle.issue(9_000_001, [(2, 16), (2, 24)], 3, 7, dtype, CPU)):
        moved = copied(tensor)
        assert moved.isnan().any(-1).all()
        assert handle.decode(moved) == codes_of(9_000_001, slot, rows)


@given(st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_other_tensors_are_no_handles(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(2, 2, 3, 16, generator=generator).to(dtype)
    for tensor in (
        random,
        torch.full_like(random, torch.nan),
        torch.zeros_like(random),
        random[:, :, :0],
        random[0],
    ):
        assert handle.decode(tensor) is None
    spoiled = handle.issue(5, [(2, 16)], 2, 3, dtype, CPU)[0].clone()
    length = next(dim for dim in range(17) if handle.unfit_reason(dtype, dim + 1) is None)
    spoiled[1, 0, 0, int(torch.randint(length, (), generator=generator))] = 1.0
    assert handle.decode(spoiled) is None


def test_heads_too_narrow_for_a_code_are_named() -> None:
    assert "head_dim of 15 is under 16" in str(handle.unfit_reason(torch.bfloat16, 15))
    assert handle.unfit_reason(torch.bfloat16, 16) is None
    assert "dtype torch.int8" in str(handle.unfit_reason(torch.int8, 64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_no_piece_of_a_handle_passes_for_numbers(dtype: torch.dtype, batch: int) -> None:
    issued = handle.issue(77, [(2, 16), (2, 24)], batch, 70, dtype, CPU)
    for tensor in issued:
        for begin in range(70):
            assert registry.first_handle([tensor[:, :, begin:].clone()]) is not None
    assert registry.first_handle([torch.full((batch, 2, 5, 16), torch.nan, dtype=dtype)]) is None


# Fresh graphs: last, for what was compiled before is gone. ------------------------------------------------------------


@torch.no_grad()
def model_with_more_tokens(model: nn.Module, past: Any) -> Tensor:
    return model(torch.full((3, 5), 7), past_key_values=past, use_cache=True).logits


def test_model_past_dynamos_last_limit_gets_no_numbers_from_a_handle(fresh_dynamo: None) -> None:
    """Dynamo would run the model as it is, and ask no backend."""
    model = build("plain", 1)
    model.compile(backend="specache", options={**SMALL, "bits": 2})
    past = generate(model).past_key_values
    refused_once_more = pytest.raises(specache_fx.UnsupportedGraphError, match="as often as Dynamo allows")
    with torch._dynamo.config.patch(accumulated_recompile_limit=1), refused_once_more:
        model_with_more_tokens(model, past)


@pytest.mark.parametrize("dtype", nightly_unless(lambda dtype: dtype == torch.bfloat16, DTYPES), ids=str)
def test_uncompiled_model_is_refused_a_handle(dtype: torch.dtype, fresh_dynamo: None) -> None:
    model = build("plain", 1).to(dtype)
    model.compile(backend="specache", options={**SMALL, "bits": 2})
    past = generate(model).past_key_values
    uncompiled = build("plain", 1).to(dtype)
    assert_refused(lambda: step(uncompiled, copy.deepcopy(past)))
    assert_refused(lambda: step(uncompiled, past))


def test_strict_raises_with_gradients(fresh_dynamo: None) -> None:
    model = build("plain")
    model.compile(backend="specache", options={**SMALL, "strict": True})
    with pytest.raises(BackendCompilerFailed, match="gradients are enabled"):
        model(torch.full((3, 4), 5), use_cache=True)


def test_layers_of_different_lengths_are_refused(fresh_dynamo: None) -> None:
    model = build("plain")  # of its own: Dynamo's graphs have seen all layers grow alike
    model.compile(backend="specache", options={**SMALL, "bits": 2})
    past = generate(model).past_key_values
    past.layers[1].keys, past.layers[1].values = (
        x[:, :, :-3] for x in (past.layers[1].keys, past.layers[1].values)
    )
    with refused("not of the same tokens"):
        step(model, past)

"""A saved cache belongs to all that made its numbers: weights, adapters, and the Python values that a graph has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from support.process import python
from support.zoo import SMALL, build
from torch import Tensor, nn

import specache_fx
from specache_fx import PrefixStore, SavedCacheError
from specache_fx.saved.saving import FILE
from specache_fx.saved.tensor_file import opened

PROMPT = torch.randint(3, 128, (1, 30), generator=torch.Generator().manual_seed(1))
LONGER = torch.cat([PROMPT, PROMPT[:, :5]], 1)


def told(folder: Path) -> dict[str, dict[str, str]]:
    """The Python values of a saved cache's first session."""
    with opened(folder / FILE) as file:
        return file.about["sessions"][0]["values"]  # type: ignore[no-any-return]


# Adapters -------------------------------------------------------------------------------------------------------------

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 64, "init_lora_weights": False}


def with_adapters() -> Any:
    model = get_peft_model(
        build("plain", 1), LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1, **LORA), "a"
    )
    model.add_adapter("b", LoraConfig(target_modules=["q_proj", "v_proj"], **LORA))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.2, generator=generator)
    return specache_fx.compile(model.eval(), bits=16, **SMALL)


@torch.no_grad()
def read(model: Any, ids: Tensor = PROMPT, past: Any = None) -> Any:
    return model(ids, past_key_values=past, use_cache=True).past_key_values


@pytest.fixture(scope="module")
def adapted() -> Iterator[Any]:
    torch._dynamo.reset()
    yield with_adapters()
    torch._dynamo.reset()


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


@contextlib.contextmanager
def active(model: Any, *names: str) -> Iterator[None]:
    model.base_model.set_adapter([*names])
    try:
        yield
    finally:
        model.base_model.set_adapter(["a"])


@contextlib.contextmanager
def scaled(model: Any, by: float) -> Iterator[None]:
    for layer in layers_of(model):
        layer.scaling["a"] *= by
    try:
        yield
    finally:
        for layer in layers_of(model):
            layer.scaling["a"] /= by


@contextlib.contextmanager
def merged(model: Any) -> Iterator[None]:
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
        model.load_state_dict(kept)


@contextlib.contextmanager
def weighted(model: Any) -> Iterator[None]:
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], "c", combination_type="linear")
    try:
        with active(model, "c"):
            yield
    finally:
        model.delete_adapter("c")
        model.base_model.set_adapter(["a"])


STATES: dict[str, Callable[[Any], Any]] = {
    "another": lambda model: active(model, "b"),
    "both": lambda model: active(model, "a", "b"),
    "another order": lambda model: active(model, "b", "a"),
    "scaled": lambda model: scaled(model, 0.5),
    "switched off": lambda model: model.disable_adapter(),
    "merged": merged,
    "weighted": weighted,
}


@pytest.mark.parametrize("state", STATES)
def test_an_entry_is_of_the_adapters_that_were_on(state: str, adapted: Any, tmp_path: Path) -> None:
    store, decoder = PrefixStore(tmp_path / "store", 1 << 30), adapted.get_base_model()
    past = read(decoder)
    store.put(PROMPT, past)
    specache_fx.save(past, tmp_path)
    with STATES[state](adapted):
        for model in (adapted, decoder):
            assert store.get(model, LONGER) == (None, 0)
            with pytest.raises(SavedCacheError, match="another model's: this one has "):
                specache_fx.load(model, tmp_path)
    for model in (adapted, decoder):
        assert store.get(model, LONGER)[1] == 30 and specache_fx.load(model, tmp_path) is not None
    assert len(list(store.folder.glob("*.safetensors"))) == 1  # the others are passed over, not removed


def test_a_store_keeps_an_entry_for_each_state_of_adapters(adapted: Any, tmp_path: Path) -> None:
    store, decoder = PrefixStore(tmp_path, 1 << 30), adapted.get_base_model()
    states = {
        "a": contextlib.nullcontext,
        "b": lambda: active(adapted, "b"),
        "scaled": lambda: scaled(adapted, 0.5),
    }
    plain = {}
    for name, state in states.items():
        with state():
            plain[name] = read(decoder)
            store.put(PROMPT, plain[name])
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    for name, state in states.items():
        with state(), torch.no_grad():
            past, num_tokens = store.get(adapted, LONGER)
            ours = decoder(LONGER[:, 30:], past_key_values=past).logits
            assert num_tokens == 30 and torch.equal(
                ours, decoder(LONGER[:, 30:], past_key_values=plain[name]).logits
            )


def test_what_no_number_depends_on_is_not_compared(adapted: Any, tmp_path: Path) -> None:
    decoder = adapted.get_base_model()
    specache_fx.save(read(decoder), tmp_path)
    adapted.add_adapter("unused", LoraConfig(target_modules=["q_proj"], **LORA))
    implementation = decoder.config._attn_implementation
    hook = decoder.layers.register_forward_hook(lambda *_: None)
    try:
        for module in adapted.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        decoder.config._attn_implementation = "eager"
        decoder.config.attention_dropout = 0.2
        decoder.gradient_checkpointing = True
        decoder.train()
        assert specache_fx.load(adapted, tmp_path) is not None
    finally:
        decoder.eval()
        hook.remove()
        adapted.delete_adapter("unused")
        decoder.gradient_checkpointing = False
        decoder.config._attn_implementation = implementation
        decoder.config.attention_dropout = 0.0


def test_a_cache_that_two_models_read_is_not_saved(adapted: Any, tmp_path: Path) -> None:
    decoder, store = adapted.get_base_model(), PrefixStore(tmp_path, 1 << 30)
    for tokens in (4, 1):  # a further turn, and a decode step
        past = read(decoder)
        with active(adapted, "b"):
            past = read(decoder, PROMPT[:, :tokens], past)
        with pytest.raises(SavedCacheError, match=r"active_adapter.* of .*q_proj was '?.*a.*, and then .*b"):
            specache_fx.save(past, tmp_path)
        with pytest.raises(SavedCacheError, match=r"Read its tokens again"):
            store.put(torch.cat([PROMPT, PROMPT[:, :tokens]], 1), past)
    past, weight = read(decoder), decoder.lm_head.weight
    with torch.no_grad():
        weight.mul_(1)
    with pytest.raises(SavedCacheError, match=r"'lm_head.weight' of this cache's model has changed since"):
        specache_fx.save(past, tmp_path)
    specache_fx.save(read(decoder, PROMPT, None), tmp_path)  # the remedy


@pytest.mark.parametrize("tokens", [4, 1], ids=["turn", "step"])
def test_a_cache_that_goes_on_in_another_model_is_not_saved(tokens: int, tmp_path: Path) -> None:
    torch._dynamo.reset()
    first, second = (specache_fx.compile(build("plain", 1), bits=16, **SMALL) for _ in range(2))
    with torch.no_grad():
        for weight in second.parameters():
            weight.add_(0.01)
    past = read(first)
    for model in (first, second):
        past = read(model, PROMPT[:, :tokens], past)
    with pytest.raises(
        SavedCacheError, match=r"has changed since the cache's first tokens were read. Or two modules"
    ):
        specache_fx.save(past, tmp_path)
    specache_fx.save(read(second), tmp_path)  # the remedy


def test_adapters_of_transformers_own_are_compared_too(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model: Any = build("plain", 1)
    for name in ("a", "b"):
        model.add_adapter(LoraConfig(target_modules=["q_proj", "v_proj"], **LORA), name)
    specache_fx.compile(model.eval(), bits=16, **SMALL)
    model.set_adapter("a")
    specache_fx.save(read(model), tmp_path)
    model.set_adapter("b")
    with pytest.raises(SavedCacheError, match=r"active_adapter"):
        specache_fx.load(model, tmp_path)
    model.set_adapter("a")
    model.disable_adapters()
    with pytest.raises(SavedCacheError, match=r"_disable_adapters of .*q_proj, not False"):
        specache_fx.load(model, tmp_path)
    model.enable_adapters()
    assert specache_fx.load(model, tmp_path) is not None
    torch._dynamo.reset()


# A module's own numbers -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention with all kinds of Python values beside its weights."""

    cap = 30.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.drop, self.act = nn.LayerNorm(16), nn.Dropout(0.1), nn.SiLU()
        self.blocks = nn.ModuleList([nn.Tanh()])
        self.temperature, self.width, self.bias, self.mode = 0.5, 3, True, "sum"
        self.config, self.table = SimpleNamespace(theta=1e4), torch.linspace(0, 1, 16)
        self.scales, self.kinds, self.finish = {"x": 1.5}, ["a"], F.gelu
        self.tags, self.frozen = {"double", "other"}, frozenset(["half"])
        self.dropout, self.calls, self.ready, self.unread = 0.1, 0, False, 1.0

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        self.calls += 1
        if not self.ready:
            self.ready = True
        h = self.norm(x) * self.temperature + self.table / self.config.theta
        if self.bias:
            h = h + self.width
        for scale in self.scales.values():
            h = h * scale
        h = h * len(self.kinds) if self.mode == "sum" else h
        h = h * 2 if "double" in self.tags else h
        h = h / 2 if "half" in self.frozen else h
        for block in self.blocks:
            h = block(h)
        q, k, v = self.qkv(h).unflatten(-1, (6, 8)).transpose(1, 2).split(2, 1)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        y = self.o(self.drop(y.transpose(1, 2).flatten(2)))
        y = F.dropout(self.finish(self.act(y)), self.dropout, self.training)
        return x + self.cap * torch.tanh(y / self.cap), (k, v)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block, self.head = nn.Embedding(128, 16), Block(), nn.Linear(16, 128)

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        x, past = self.block(self.embedding(ids), past)
        return self.head(x), past


def make_own() -> Any:
    return torch.compile(Decoder().eval(), backend="specache", options={**SMALL, "bits": 16})


@torch.no_grad()
def read_own(model: Any, ids: Tensor = PROMPT, past: Any = None) -> Any:
    return model(ids, past)[1]


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    torch._dynamo.reset()
    yield make_own()
    torch._dynamo.reset()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "float": (lambda block: setattr(block, "temperature", 0.7), "has 0.7 as temperature of block, not 0.5"),
    "int": (lambda block: setattr(block, "width", 4), "has 4 as width of block, not 3"),
    "flag": (lambda block: setattr(block, "bias", False), "has False as bias of block"),
    "string": (lambda block: setattr(block, "mode", "mean"), "has 'mean' as mode of block"),
    "none": (lambda block: setattr(block, "width", None), "has None as width of block"),
    "gone": (lambda block: delattr(block, "width"), "has nothing as width of block"),
    "class": (lambda block: setattr(block, "cap", 50.0), "has 50.0 as cap of block, not 30.0"),
    "config": (lambda block: setattr(block.config, "theta", 5e5), r"has 500000.0 as config\.theta of block"),
    "item": (lambda block: block.scales.update(x=2.0), r"has 2.0 as scales\['x'\] of block, not 1.5"),
    "further item": (lambda block: block.scales.update(y=2.0), r"has keys \['x', 'y'\] as scales of block"),
    "list": (lambda block: block.kinds.append("b"), r"has \['a', 'b'\] as kinds of block"),
    "set": (lambda block: block.tags.discard("double"), r"has {'other'} as tags of block"),
    "frozen set": (
        lambda block: setattr(block, "frozen", frozenset()),
        r"has {} as frozen of block, not {'half'}",
    ),
    "function": (lambda block: setattr(block, "finish", F.relu), "has torch.nn.functional.relu as finish"),
    "module": (lambda block: setattr(block, "act", nn.GELU()), "has a GELU as block.act, not a SiLU"),
    "further module": (lambda block: block.blocks.append(nn.Tanh()), r"keys \['0', '1'\] as _modules"),
    "epsilon": (lambda block: setattr(block.norm, "eps", 1e-3), "has 0.001 as eps of block.norm, not 1e-05"),
    "tensor": (lambda block: setattr(block, "table", block.table + 1), "other numbers in 'block.table'"),
    "no bias": (lambda block: setattr(block.o, "bias", None), "has no weight 'block.o.bias'"),
}


@pytest.fixture(scope="module")
def own_saved(own: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    specache_fx.save(read_own(own), folder)
    PrefixStore(folder / "store", 1 << 30).put(PROMPT, read_own(own))
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_a_number_of_a_module_that_changed_is_named(change: str, own_saved: Path) -> None:
    model, (apply, said) = make_own(), CHANGES[change]
    store = PrefixStore(own_saved / "store", 1 << 30)
    assert specache_fx.load(model, own_saved) is not None and store.get(model, LONGER)[1] == 30
    apply(model.block)
    with pytest.raises(SavedCacheError, match=said):
        specache_fx.load(model, own_saved)
    assert store.get(model, LONGER) == (None, 0)


def test_what_a_module_counts_or_never_reads_is_not_compared(own_saved: Path) -> None:
    model = make_own()
    block = model.block
    block.calls, block.ready, block.unread, block.dropout, block.drop.p = 7, True, 2.0, 0.3, 0.4
    model.note = "a path"
    block.register_forward_hook(lambda *_: None)
    assert specache_fx.load(nn.Sequential(model.train()), own_saved) is not None


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_the_same_values_are_noted_by_each_compile_length_and_batch(
    dynamic: bool | None, own_saved: Path, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    wanted = told(own_saved)
    other = Decoder().eval()
    other.block.temperature = 0.7  # from the second one on, Dynamo takes a float for an input
    for module in (other, Decoder().eval()):
        model = torch.compile(module, backend="specache", options={**SMALL, "bits": 16}, dynamic=dynamic)
        for ids in (PROMPT, LONGER, LONGER[:, :17].expand(3, -1)):
            specache_fx.save(read_own(model, ids), tmp_path)
            expected = {**wanted, "block": {**wanted["block"], "temperature": str(module.block.temperature)}}
            assert told(tmp_path) == expected
    past = read_own(model, PROMPT[:, :1], read_own(model))
    specache_fx.save(past, tmp_path)
    assert told(tmp_path) == wanted
    torch._dynamo.reset()


def test_another_process_tells_the_same(own_saved: Path, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from test_saved_identity import *
model = make_own()
assert specache_fx.load(model, {str(own_saved)!r}) is not None
specache_fx.save(read_own(model), {str(tmp_path)!r})
"""
    python("-c", program)
    assert told(tmp_path) == told(own_saved)


def test_an_int_that_the_caller_counts_up_is_left_out(own: Any, tmp_path: Path) -> None:
    past = read_own(own)
    block = own.block
    try:
        for block.width in (4, 5):
            past = read_own(own, PROMPT[:, :1], past)
        specache_fx.save(past, tmp_path)
        assert "width" not in told(tmp_path)["block"]
        block.temperature = 0.6
        past = read_own(own, PROMPT[:, :1], past)
        with pytest.raises(SavedCacheError, match=r"temperature of block was 0.5 .*, and then 0.6"):
            specache_fx.save(past, tmp_path)
    finally:
        block.width, block.temperature = 3, 0.5


def test_a_cache_of_two_modules_with_one_name_is_not_saved(tmp_path: Path) -> None:
    model, head = build("plain", 1), build("plain", 1)

    @torch.no_grad()
    def both(ids: Tensor) -> Any:
        out = model(ids, use_cache=True)
        return head.get_input_embeddings()(ids).sum() + out.logits.sum(), out.past_key_values

    _, past = torch.compile(both, backend="specache", options=SMALL)(PROMPT)
    with pytest.raises(SavedCacheError, match="two modules in one compiled function"):
        specache_fx.save(past, tmp_path)


def test_a_cache_of_two_modules_whose_numbers_share_a_name_is_not_saved(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model, one, two = build("plain", 1), Scale(0.5), Scale(0.25)

    @torch.no_grad()
    def both(ids: Tensor) -> Any:
        out = model(ids, use_cache=True)
        return one(out.logits), two(out.logits), out.past_key_values

    *_, past = torch.compile(both, backend="specache", options=SMALL)(PROMPT)
    with pytest.raises(SavedCacheError, match="two modules in one compiled function"):
        specache_fx.save(past, tmp_path)


def test_a_torch_whose_guards_cannot_be_read_computes_and_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specache_fx.direct.traced_values.new_values", None)
    torch._dynamo.reset()
    past = read(specache_fx.compile(build("plain", 1), bits=16, **SMALL, prompts="traced"))
    assert past.get_seq_length() == PROMPT.shape[1]
    assert "a graph's guards can't be read in torch" in caplog.text and "NoneType" in caplog.text
    with pytest.raises(SavedCacheError, match=r"torch 2\S+ hides them"):
        specache_fx.save(past, tmp_path)

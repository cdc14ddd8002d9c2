"""`prompts="untraced"`: calls of several tokens run as the model is, with the answers of those that are traced."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.counts import num_graphs
from support.open_sessions import session_of
from support.zoo import SMALL, TWO_LANES, build, left_padded
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AttentionInterface, DynamicCache, QuantizedCache, StaticCache

import specache_fx
from specache_fx.calls.call import Call
from specache_fx.calls.this_thread import having, here
from specache_fx.errors import CacheHandleError, ConfigError, SavedCacheError
from specache_fx.runtime.handles.handle_tensor import Handle
from specache_fx.runtime.session import claims, registry

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, dict[str, Any]] = {
    "16 bits": SMALL | {"bits": 16},
    "default": {key: value for key, value in SMALL.items() if key != "top_k"} | {"bits": 1},
    "two lanes": TWO_LANES | {"bits": 2, "sink_tokens": 2},
    "keys alone": SMALL | {"policy": "kcache"},
}
MODELS = (
    *("llama", "gpt2", "gemma3_text", "mistral-window", "llama4_text", "bloom", "qwen3", "lfm2"),
    *("deepseek_v3", "gemma4_text"),  # laid out otherwise, or traced
)


def compiled(name: str, prompts: str = "untraced", **options: Any) -> Any:
    torch._dynamo.reset()
    counters.clear()
    return specache_fx.compile(build(name), **{**OPTIONS["default"], **options, "prompts": prompts})


def generate(model: Any, ids: Tensor, past: Any = None, count: int = 11, **given: Any) -> Any:
    given = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **given}
    return model.generate(ids, past_key_values=past, max_new_tokens=count, **given)


def chat(model: Any) -> tuple[Tensor, specache_fx.SessionStats]:
    """Logits of a padded prompt, a turn of several tokens, and one after a crop; and the last cache's stats."""
    prompt = left_padded((23, 19))
    out = generate(model, prompt["input_ids"], attention_mask=prompt["attention_mask"])
    logits, mask = [*out.logits], prompt["attention_mask"]
    for crop in (0, 3):
        past = out.past_key_values
        ids = torch.cat([out.sequences, prompt["input_ids"][:, -6:] + 1], 1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        if crop and not any(getattr(layer, "is_sliding", True) for layer in past.layers):
            past.crop(-crop)
            ids, mask = ids[:, :-crop], mask[:, :-crop]
        out = generate(model, ids, past, attention_mask=mask)
        logits += out.logits
    return torch.stack(logits), specache_fx.stats(out.past_key_values)


@pytest.mark.parametrize(
    ("name", "options"),
    nightly_unless(
        (("llama", "two lanes"), ("gemma3_text", "default"), ("lfm2", "default")).__contains__,
        itertools.product(MODELS, OPTIONS),
    ),
)
@torch.no_grad()
def test_a_chat_has_the_answers_of_a_traced_one(name: str, options: str) -> None:
    expected, stats = chat(compiled(name, "traced", **OPTIONS[options]))
    traced = num_graphs()
    found, mine = chat(compiled(name, **OPTIONS[options]))
    # A latent's session begins at the first step, with other guesses.
    if name != "deepseek_v3" or options != "two lanes":
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (mine.kv_len, mine.device_bytes, mine.host_used_bytes) == (
            *(stats.kv_len, stats.device_bytes, stats.host_used_bytes),
        )
        assert mine.topk_hit_rate == stats.topk_hit_rate
    if name not in ("deepseek_v3", "gemma4_text"):
        assert num_graphs() < traced


@torch.no_grad()
def test_a_prompt_and_turns_make_no_graph() -> None:
    model, ids = compiled("plain"), torch.arange(3, 40)[None]
    past = model(ids, use_cache=True).past_key_values
    assert num_graphs() == 0 and session_of(past).kv_len == 37
    model(ids[:, :5], past_key_values=past, use_cache=True)
    assert num_graphs() == 0 and session_of(past).kv_len == 42
    for token in ids.T[:3]:
        model(token[:, None], past_key_values=past, use_cache=True)
    assert num_graphs() == 1


@pytest.mark.parametrize("bits", [16, 2])
@torch.no_grad()
def test_chunks_forks_beams_and_one_token_are_the_plain_models(bits: int) -> None:
    plain, model = build("plain"), compiled("plain", bits=bits, residual_length=64)  # all in the window
    ids = torch.arange(3, 30)[None]
    whole = plain(ids).logits
    past = DynamicCache(config=model.config)
    pieces = [model(part, past_key_values=past, use_cache=True).logits for part in ids.split(9, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)
    fork = copy.deepcopy(past)
    for cache, more in ((past, ids[:, :4]), (fork, ids[:, 4:9])):
        found = model(more, past_key_values=cache, use_cache=True).logits
        expected = plain(torch.cat([ids, more], 1)).logits[:, 27:]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for given in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        assert torch.equal(generate(model, ids, **given).sequences, generate(plain, ids, **given).sequences)
    assert torch.equal(generate(model, ids[:, :1]).sequences, generate(plain, ids[:, :1]).sequences)


@torch.no_grad()
def test_the_pairs_of_one_layer_are_there_at_a_time() -> None:
    model = compiled("plain")
    past = DynamicCache(config=model.config)
    held: list[int] = []

    def count(*_: Any) -> None:
        tensors = [layer.keys for layer in past.layers if layer.keys is not None]
        held.append(sum(not each.is_meta and not isinstance(each, Handle) for each in tensors))

    for layer in model.layers:
        layer.register_forward_hook(count)
    for length in (30, 7):
        model(torch.arange(3, 3 + length)[None], past_key_values=past, use_cache=True)
    assert held == [1] * 4 and all(isinstance(layer.keys, Handle) for layer in past.layers)


class Struck(Exception):
    pass


def strike(*_: Any) -> None:
    raise Struck


@pytest.mark.parametrize("name", ["plain", "gemma3_text", "lfm2"])
@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was(name: str) -> None:
    model, ids = compiled(name), torch.arange(3, 40)[None]
    last = next(each for each in model.modules() if isinstance(each, nn.ModuleList))[-1]

    past = DynamicCache(config=model.config)
    handle = last.register_forward_pre_hook(strike)
    before = len(registry._open)
    with pytest.raises(Struck):
        model(ids, past_key_values=past, use_cache=True)
    assert past.get_seq_length() == 0 and len(registry._open) <= before
    handle.remove()
    model(ids, past_key_values=past, use_cache=True)
    expected = copy.deepcopy(past)
    handle = last.register_forward_pre_hook(strike)
    with pytest.raises(Struck):
        model(ids[:, :1].expand(1, 1).repeat(1, 2), past_key_values=past, use_cache=True)
    handle.remove()
    assert past.get_seq_length() == 37
    for cache in (past, expected):
        cache.logits = model(ids[:, 5:6], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(past.logits, expected.logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_prompts_cache_is_saved_and_loaded_by_its_model_alone(tmp_path: Path) -> None:
    model, ids = compiled("llama", bits=2), torch.arange(3, 60)[None]
    past = model(ids, use_cache=True).past_key_values
    specache_fx.save(past, tmp_path, input_ids=ids)
    loaded = specache_fx.load(model, tmp_path, input_ids=ids)
    found = [generate(model, torch.cat([ids, ids[:, :3]], 1), each).logits for each in (past, loaded)]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    other = specache_fx.compile(build("llama"), **OPTIONS["default"] | {"bits": 2})
    other.model.layers[1].input_layernorm.variance_epsilon = 0.1
    with pytest.raises(SavedCacheError, match=r"variance_epsilon"):
        specache_fx.load(other, tmp_path, input_ids=ids)


class Broken(nn.Module):
    """Splits the step's graph in two."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return self.inner(*args, **kwargs)


@torch.no_grad()
def test_pieces_of_a_model_take_their_layers_of_the_prompts_session() -> None:
    plain, model = build("llama"), build("llama")
    model.model.layers[1].mlp = Broken(model.model.layers[1].mlp)
    specache_fx.compile(model, **OPTIONS["16 bits"], prompts="untraced")
    ids = torch.arange(3, 40)[None]
    for _ in range(2):
        found, expected = generate(model, ids), generate(plain, ids)
        assert torch.equal(found.sequences, expected.sequences)
        more = torch.cat([found.sequences, ids[:, :5]], 1)
        turns = [
            generate(each, more, out.past_key_values) for each, out in ((model, found), (plain, expected))
        ]
        assert torch.equal(turns[0].sequences, turns[1].sequences)


@torch.no_grad()
def test_a_model_that_is_left_alone_keeps_plain_caches_after_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = build("llama", attn_implementation="eager")

    def spelt(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (side.repeat_interleave(groups, 1) for side in (key, value))
        scores = (query @ key.transpose(2, 3)) ** 2 * 0.01  # no attention that can be rewritten
        tokens = key.shape[2]
        hidden = torch.ones(query.shape[2], tokens, dtype=torch.bool).triu(tokens - query.shape[2] + 1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "squared_scores", spelt)
    plain.set_attn_implementation("squared_scores")
    ids = torch.arange(3, 40)[None]
    expected = generate(plain, ids).sequences
    model = specache_fx.compile(plain, **OPTIONS["16 bits"], prompts="untraced")
    for _ in range(2):
        out = generate(model, ids)
        assert torch.equal(out.sequences, expected)
    assert not any(isinstance(layer.keys, Handle) for layer in out.past_key_values.layers)


@pytest.mark.parametrize("way", ["copied", "saved"])
@torch.no_grad()
def test_a_latents_prompt_is_laid_out_anew_wherever_it_was(way: str, tmp_path: Path) -> None:
    plain, model = build("deepseek_v3"), compiled("deepseek_v3", bits=16)
    ids = torch.arange(3, 40)[None]
    past = model(ids, use_cache=True).past_key_values
    if way == "saved":
        specache_fx.save(past, tmp_path)
        past = specache_fx.load(model, tmp_path)
    else:
        held = [past]
        past = copy.deepcopy(past)
        model(ids[:, :4], past_key_values=past, use_cache=True)  # a fork: the original lives
        held.clear()
        ids = torch.cat([ids, ids[:, :4]], 1)
    ids = torch.cat([ids, ids[:, :1]], 1)
    assert torch.equal(generate(model, ids, past).sequences, generate(plain, ids).sequences)


def assert_same_answers(plain: nn.Module, model: nn.Module) -> None:
    """Of a prompt, a step, a turn and a step."""
    caches = [DynamicCache(config=each.config) for each in (plain, model)]
    ids = torch.arange(3, 40)[None]
    for part in (ids, ids[:, :1], ids[:, :12], ids[:, :1]):
        found = [each(part, cache).logits for each, cache in zip((plain, model), caches, strict=True)]
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


class Prefixed(nn.Module):
    """A soft prompt: the forward caches more tokens than it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        embeds = self.inner.get_input_embeddings()(input_ids)
        if not past_key_values.get_seq_length():
            embeds = torch.cat([embeds[:, :1].expand(-1, 5, -1) * 0.5, embeds], 1)
        return self.inner(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)


@torch.no_grad()
def test_a_layer_is_stored_as_far_as_it_has_grown() -> None:
    plain, model = (Prefixed(build("llama")) for _ in range(2))
    specache_fx.compile(model, **OPTIONS["16 bits"], prompts="untraced")
    assert_same_answers(plain, model)


@torch.no_grad()
def test_a_forward_that_runs_fewer_layers_than_its_config_says() -> None:
    plain, model = build("llama"), build("llama")
    for each in (plain, model):
        each.model.layers = each.model.layers[:1]
    specache_fx.compile(model, **OPTIONS["16 bits"], prompts="untraced")
    ids = torch.arange(3, 40)[None]
    assert torch.equal(generate(model, ids).sequences, generate(plain, ids).sequences)


@torch.no_grad()
def test_a_cache_of_another_model_is_refused() -> None:
    one, other = compiled("llama", bits=16), build("llama", layers=1)
    specache_fx.compile(other, **OPTIONS["default"] | {"bits": 16}, prompts="untraced")
    ids = torch.arange(3, 40)[None]
    past = one(ids, use_cache=True).past_key_values
    with pytest.raises(CacheHandleError):
        other(ids[:, :1], past_key_values=past, use_cache=True)
    unlike = specache_fx.compile(build("llama"), **OPTIONS["default"] | {"bits": 2}, prompts="untraced")
    with pytest.raises(CacheHandleError, match="was made with"):
        unlike(ids[:, :3], past_key_values=past, use_cache=True)


@torch.no_grad()
def test_a_failed_prompt_leaves_a_cache_without_layers_empty() -> None:
    model, past = compiled("plain"), DynamicCache()
    handle = model.layers[-1].register_forward_pre_hook(strike)
    with pytest.raises(Struck):
        model(torch.arange(3, 40)[None], past_key_values=past, use_cache=True)
    handle.remove()
    assert past.get_seq_length() == 0 and not past.layers


@torch.no_grad()
def test_a_tuple_has_the_sessions_cache_too() -> None:
    model = compiled("llama")
    out = model(torch.arange(3, 40)[None], use_cache=True, return_dict=False)
    assert isinstance(out, tuple) and session_of(out[1]).kv_len == 37


def test_a_backend_has_no_such_option() -> None:
    model = build("plain")
    model.compile(backend="specache", options={"prompts": "untraced"})
    with pytest.raises(Exception, match=r"specache_fx\.compile\(model, prompts=\.\.\.\)"), torch.no_grad():
        model(torch.arange(3, 9)[None], use_cache=True)


class Chunked(nn.Module):
    """Feeds a prompt to the module inside in pieces, with one cache."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        pieces = input_ids.split(9, dim=1)
        outs = [self.inner(part, past_key_values=past_key_values, use_cache=True) for part in pieces]
        outs[-1].logits = torch.cat([out.logits for out in outs], dim=1)
        return outs[-1]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_a_layer_may_be_updated_several_times_in_a_call(name: str) -> None:
    plain, model = (Chunked(build(name)) for _ in range(2))
    specache_fx.compile(model, **OPTIONS["16 bits"], prompts="untraced")
    assert_same_answers(plain, model)


@torch.no_grad()
def test_a_hook_may_run_another_model_on_its_own_cache() -> None:
    one, other, plain = compiled("plain", bits=16), build("llama"), build("llama")
    specache_fx.compile(other, **OPTIONS["16 bits"], prompts="untraced")
    ids, caches, found = torch.arange(3, 40)[None], [DynamicCache(), DynamicCache()], []

    def run(*_: Any) -> None:
        part = ids if not caches[0].get_seq_length() else ids[:, :5]
        found.append(
            [
                each(part, past_key_values=past).logits
                for each, past in zip((other, plain), caches, strict=True)
            ]
        )

    one.layers[0].register_forward_hook(run)
    for _ in range(2):
        one(ids, use_cache=True)
    for ours, theirs in found:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_that_is_released_in_a_turn_says_so() -> None:
    model, ids = compiled("plain"), torch.arange(3, 40)[None]
    past = model(ids, use_cache=True).past_key_values

    def release(*_: Any) -> None:
        specache_fx.release([layer.keys for layer in past.layers if isinstance(layer.keys, Handle)])

    model.layers[0].register_forward_pre_hook(release)
    with pytest.raises(CacheHandleError, match="was released"):
        model(ids[:, :4], past_key_values=past, use_cache=True)


@pytest.mark.parametrize("kind", ["4-D", "longer"])
@torch.no_grad()
def test_a_first_step_with_an_unusual_mask_is_rewritten(kind: str) -> None:
    plain, model = build("llama"), compiled("llama", bits=16)
    caches = [DynamicCache(config=each.config) for each in (plain, model)]
    ids, lengths = torch.arange(3, 40)[None], iter((37, 38, 39))
    for part in (ids, ids[:, :1], ids[:, :1]):
        length = next(lengths)
        given = {}
        if part.shape[1] == 1:
            given["attention_mask"] = (
                torch.zeros(1, 1, 1, length) if kind == "4-D" else torch.ones(1, length + 3).long()
            )
        found = [
            each(part, past_key_values=past, use_cache=True, **given).logits
            for each, past in zip((plain, model), caches, strict=True)
        ]
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
        assert isinstance(caches[1].layers[0].keys, Handle)


@pytest.mark.parametrize(
    ("name", "options", "made"),
    [
        ("llama", {}, [0, 1, 0, 0, 0, 0]),
        ("llama", {"compile_prefill": True, "lowering": "inductor"}, [1, 1, 1, 0, 0, 0]),
        ("llama", {"policy": "kivi", "bits": 2}, [1, 1, 1, 0, 0, 0]),
        ("deepseek_v3", {}, [0, 1, 1, 1, 1, 0]),  # its steps have latents
    ],
    ids=str,
)
@torch.no_grad()
def test_auto_traces_prompts_where_little_is_won(name: str, options: dict[str, Any], made: list[int]) -> None:
    """Graphs of three prompts, and of a step after each."""
    model, counted = compiled(name, "auto", **options), [0]
    for length in (30, 40, 50):
        past = model(torch.arange(3, 3 + length)[None], use_cache=True).past_key_values
        counted.append(num_graphs())
        model(torch.tensor([[5]]), past_key_values=past, use_cache=True)
        counted.append(num_graphs())
    assert [after - before for before, after in pairwise(counted)] == made


@torch.no_grad()
def test_auto_traces_prompts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Call.__init__

    def on_a_gpu(call: Call, *args: Any) -> None:
        init(call, *args)
        call.device = "cuda"

    monkeypatch.setattr(Call, "__init__", on_a_gpu)
    for prompts, made in (("auto", 1), ("untraced", 0)):
        model = compiled("llama", prompts)
        model(torch.arange(3, 33)[None], use_cache=True)
        assert num_graphs() == made


def test_values_of_prompts_that_are_refused() -> None:
    for given, words in (
        ({"compile_prefill": True}, "contradicts compile_prefill=True"),
        ({"policy": "kivi"}, "contradicts policy='kivi'"),
    ):
        with pytest.raises(ConfigError, match=words):
            specache_fx.compile(build("plain"), prompts="untraced", **given)
    with pytest.raises(ConfigError, match="choose one of 'auto', 'traced', 'untraced'"):
        specache_fx.compile(build("plain"), prompts="later")
    with pytest.raises(ConfigError, match="prompts: this module is compiled already"):
        specache_fx.compile(torch.compile(build("plain"), backend="specache"), prompts="traced")


@pytest.mark.parametrize("bits", nightly_unless((16).__eq__, [16, 2]))
@torch.no_grad()
def test_a_static_caches_prompt_makes_no_graph(bits: int) -> None:
    def told(model: Any) -> Tensor:
        """A padded prompt, steps and a turn; then the same cache from its start, after a prompt that fails."""
        cache, logits, prompt = StaticCache(config=model.config, max_cache_len=90), [], left_padded((23, 19))
        for again in range(2):
            if again:
                cache.reset()
                handle = model.model.layers[-1].register_forward_pre_hook(strike)
                with pytest.raises(Struck):
                    model(prompt["input_ids"], past_key_values=cache)
                handle.remove()
                cache.reset()
            mask = prompt["attention_mask"]
            for ids in (
                prompt["input_ids"],
                *prompt["input_ids"].split(1, 1)[-4:],
                prompt["input_ids"][:, -7:],
            ):
                mask = (
                    mask
                    if ids is prompt["input_ids"]
                    else nn.functional.pad(mask, (0, ids.shape[1]), value=1)
                )
                logits.append(model(ids, past_key_values=cache, attention_mask=mask).logits[:, -1])
                graphs_after.append(num_graphs())
        return torch.stack(logits)

    options, graphs_after = {**OPTIONS["default"], "bits": bits}, list[int]()
    expected = told(compiled("llama", "traced", **options))
    assert graphs_after[0] == 1
    graphs_after.clear()
    found = told(compiled("llama", **options))
    assert [after - before for before, after in pairwise([0, *graphs_after])] == [0, 1, *10 * [0]]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if bits == 16:
        torch.testing.assert_close(found, told(build("llama")), rtol=1e-4, atol=1e-4)
    for given in ({}, {"num_beams": 2}):
        models = build("llama"), compiled("llama", bits=16)
        outs = [
            generate(each, torch.arange(3, 40)[None], cache_implementation="static", **given)
            for each in models
        ]
        assert torch.equal(outs[0].sequences, outs[1].sequences)


@pytest.mark.parametrize("bits", [16, 2])
@torch.no_grad()
def test_three_graphs_decode_all_batches_padded_or_not(bits: int) -> None:
    plain, model = build("llama"), compiled("llama", bits=bits)
    alone = {width: torch.arange(3, 3 + width)[None] for width in (9, 30, 41)}
    for ids in alone.values():
        assert_generates(plain, model, bits, ids)
    assert num_graphs() == 1
    for lengths in ((20, 13, 17), (20, 13, 17, 9), (12, 12), (20,)):
        prompt = left_padded(lengths)
        assert_generates(plain, model, bits, prompt["input_ids"], attention_mask=prompt["attention_mask"])
    for given in ({"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}):
        assert_generates(plain, model, bits, alone[30], **given)
    assert_generates(plain, model, bits, alone[9].expand(2, -1), num_beams=2)
    assert_generates(plain, model, bits, alone[9])
    assert num_graphs() == 3


@pytest.mark.parametrize("warm", ["block", "background"])
def test_a_beam_search_moves_rows_in_place(warm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forks: list[Any] = []
    fork = claims.fork
    monkeypatch.setattr(claims, "fork", lambda *args: forks.append(args) or fork(*args))
    model = compiled("llama", "auto", bits=2, warm=warm)
    for count in (2, 3):
        generate(model, torch.arange(3, 40)[None], num_beams=count)
    assert not forks


@pytest.mark.parametrize("name", ["llama", "gpt_neo"])
@torch.no_grad()
def test_a_first_step_of_several_rows_takes_what_broadcasts(name: str) -> None:
    plain, model = build(name), compiled(name, bits=16)
    for batch in (3, 2):
        caches = [DynamicCache(config=each.config) for each in (plain, model)]
        ids = torch.arange(3, 3 + 20 * batch).reshape(batch, 20)
        for part in (ids, ids[:, :1], ids[:, :1]):
            start = caches[0].get_seq_length()
            given: dict[str, Any] = {"position_ids": torch.arange(start, start + part.shape[1])[None]}
            if start and name == "llama" and batch == 3:
                given["attention_mask"] = torch.ones(1, 1, 1, start + 1, dtype=torch.bool)
            found = [
                each(part, past_key_values=cache, **given).logits
                for each, cache in zip((plain, model), caches, strict=True)
            ]
            torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_prompt_whose_mask_differs_by_head_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = build("llama"), compiled("llama", bits=16)
    ids = torch.arange(3, 23)[None]
    mask = torch.ones(1, 4, 20, 20, dtype=torch.bool).tril()
    mask[:, 1, :, 2:5] = False
    mask |= torch.eye(20, dtype=torch.bool)
    found = [each(ids, attention_mask=mask, use_cache=True).logits for each in (plain, model)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert "is left alone" in caplog.text or num_graphs() == 1


@torch.no_grad()
def test_a_quantised_cache_of_transformers_runs_as_it_is() -> None:
    plain, model = build("llama"), compiled("llama", bits=16)
    caches = [QuantizedCache("fp8", each.config) for each in (plain, model)]
    ids = torch.arange(3, 33)[None]
    for part in (ids, ids[:, :1], ids[:, :1]):
        found = [
            each(part, past_key_values=cache).logits
            for each, cache in zip((plain, model), caches, strict=True)
        ]
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def assert_generates(plain: Any, model: Any, bits: int, ids: Tensor, **given: Any) -> None:
    """The plain model's tokens, where bits are 16."""
    torch.manual_seed(3)
    found = generate(model, ids, **given).sequences
    torch.manual_seed(3)
    if bits == 16:
        assert torch.equal(found, generate(plain, ids, **given).sequences)


class OwnMask(nn.Module):
    """Takes masks to add to the scores, and no others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
    ) -> Any:
        assert attention_mask is None or attention_mask.dim() == 4
        return self.inner(
            input_ids, past_key_values=past_key_values, attention_mask=attention_mask, use_cache=use_cache
        )


@torch.no_grad()
def test_a_step_of_several_rows_gets_what_the_caller_gives() -> None:
    plain, model = (OwnMask(build("llama")) for _ in range(2))
    specache_fx.compile(model, **OPTIONS["16 bits"])
    ids = torch.arange(3, 43).reshape(2, 20)
    caches = [DynamicCache(config=each.config) for each in (plain, model)]
    for part in (ids, ids[:, :1], ids[:, :1]):
        found = [each(part, cache).logits for each, cache in zip((plain, model), caches, strict=True)]
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


class SomeLayers(nn.Module):
    """Keeps the pairs of its layers at other numbers than 0, 1."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config
        for number, layer in enumerate(inner.model.layers):
            layer.self_attn.layer_idx = 2 * number + 1

    def forward(self, input_ids: Tensor, past_key_values: Any, use_cache: bool = True) -> Any:
        kv_len = past_key_values.layers[1].get_seq_length() if past_key_values.layers else 0
        q_len = input_ids.shape[1]
        seen = torch.ones(q_len, kv_len + q_len, dtype=torch.bool).tril(kv_len)[None, None]
        positions = torch.arange(kv_len, kv_len + q_len)[None]
        return self.inner(
            input_ids,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )


@torch.no_grad()
def test_layers_without_pairs_lie_between_those_that_have_some() -> None:
    plain, model = (SomeLayers(build("llama")) for _ in range(2))
    specache_fx.compile(model, **OPTIONS["16 bits"])
    ids, caches = torch.arange(3, 40)[None], [DynamicCache(), DynamicCache()]
    for part in (ids, ids[:, :1], ids[:, :1], ids[:, :7], ids[:, :1]):
        found = [each(part, cache).logits for each, cache in zip((plain, model), caches, strict=True)]
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert session_of([(caches[1].layers[1].keys,)]).kv_len == 47


@torch.no_grad()
def test_a_turn_through_other_layers_is_refused_and_leaves_the_cache() -> None:
    model, ids = compiled("llama", bits=16), torch.arange(3, 40)[None]
    past = model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
    expected = model(ids[:, :1], past_key_values=copy.deepcopy(past), use_cache=True).logits
    sides = torch.zeros(2, 1, 2, 5, 16)
    handle = model.model.layers[1].register_forward_hook(lambda *_: past.update(*sides, 2) and None)
    with pytest.raises(CacheHandleError, match="updates other layers than those that its KV cache has"):
        model(ids[:, :5], past_key_values=past, use_cache=True)
    handle.remove()
    assert len(past.layers) == 2 and past.get_seq_length() == 37
    found = model(ids[:, :1], past_key_values=past, use_cache=True).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_another_threads_compile_traces_no_prompt() -> None:
    model, ids = compiled("plain"), torch.arange(3, 40)[None]
    found: list[Any] = []

    def prompt() -> None:
        with torch.no_grad():
            found.append(model(ids, use_cache=True).past_key_values)

    def backend(gm: Any, _: Any) -> Any:
        assert torch.compiler.is_compiling()
        thread = threading.Thread(target=prompt)
        thread.start()
        thread.join(20)
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert num_graphs() == 1 and session_of(found[0]).kv_len == 37


def test_what_a_step_tells_dynamo_ends_with_it() -> None:
    seen = []

    def note() -> None:
        seen.append(here.mark)

    with having(mark=note):
        note()
        with contextlib.suppress(Struck), having(mark=strike):
            note()
            strike()
        note()
    note()
    assert seen == [note, strike, note, None]


@torch.no_grad()
def test_turns_through_one_model_are_noted_once() -> None:
    model, ids = compiled("plain"), torch.arange(3, 40)[None]
    past = model(ids, use_cache=True).past_key_values
    noted = len(session_of(past).origin._values)
    for _ in range(3):
        model(ids[:, :4], past_key_values=past, use_cache=True)
    assert len(session_of(past).origin._values) == noted

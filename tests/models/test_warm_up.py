"""`warm_up`: afterwards no answer compiles anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.counts import num_graphs
from support.zoo import SMALL, WINDOW, build, left_padded
from transformers import T5Config, T5ForConditionalGeneration

import specache_fx
from specache_fx import ConfigError
from specache_fx.runners import decode_runner

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
CASES = [
    *(("llama", "auto"), ("llama", "traced")),
    *(("gemma3_text", "auto"), ("gemma3_text", "traced"), ("gpt2", "auto"), ("lfm2", "auto")),
]


@pytest.mark.parametrize(("name", "prompts"), nightly_unless(lambda case: case == CASES[0], CASES))
def test_no_answer_compiles_anything_afterwards(
    name: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    lower = decode_runner.lower_static
    monkeypatch.setattr(decode_runner, "lower_static", lambda *a, **k: made.append(a) or lower(*a, **k))
    model: Any = specache_fx.compile(build(name), **SMALL, bits=2, prompts=prompts)
    state = torch.get_rng_state()
    specache_fx.warm_up(model, batch_sizes=(3, 1))
    assert torch.equal(torch.get_rng_state(), state)
    graphs, lowered = num_graphs(), len(made)
    assert graphs and lowered
    with torch.compiler.set_stance("fail_on_recompile"):
        answers(model, padded=prompts != "traced")
    assert (num_graphs(), len(made)) == (graphs, lowered)


def answers(model: Any, padded: bool) -> None:
    """Of prompts shorter and longer than a window, drawn and searched, padded too or not, and of a turn each."""
    given: dict[str, Any] = {"max_new_tokens": 9, "return_dict_in_generate": True}
    for length in (1, 5, WINDOW - 2, WINDOW + 30):
        prompts = [left_padded((length, max(1, length - 2), max(1, length - 1))), left_padded((length,) * 3)]
        for prompt in (*prompts[not padded :], {"input_ids": prompts[1]["input_ids"][:1]}):
            out = model.generate(**prompt, **given, do_sample=True)
            mask = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"]))
            longer = torch.cat([out.sequences, out.sequences[:, -4:]], 1)
            mask = torch.nn.functional.pad(mask, (0, longer.shape[1] - mask.shape[1]), value=1)
            model.generate(longer, attention_mask=mask, past_key_values=out.past_key_values, **given)
        model.generate(prompts[1]["input_ids"][:1], **given, num_beams=3)


def test_settings_of_the_models_generation_are_left_out_and_kept() -> None:
    model: Any = specache_fx.compile(build("llama"), **SMALL)
    kept = model.generation_config
    kept.num_return_sequences, kept.stop_strings = 2, ["x"]
    kept.cache_implementation, kept.use_cache = "static", False
    specache_fx.warm_up(model)
    assert model.generation_config is kept and kept.num_return_sequences == 2
    assert num_graphs() >= 1


@torch.no_grad()
def test_turns_are_left_out_where_none_will_come() -> None:
    model: Any = specache_fx.compile(build("llama"), **SMALL, prompts="traced")
    specache_fx.warm_up(model, turns=False)
    made = num_graphs()
    out = model.generate(torch.arange(3, 30)[None], max_new_tokens=3, return_dict_in_generate=True)
    assert num_graphs() == made
    model(torch.arange(3, 9)[None], past_key_values=out.past_key_values)
    assert num_graphs() > made


def wrapper() -> Any:
    return torch.compile(build("llama"), backend="specache")


def encoder_decoder() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    return specache_fx.compile(T5ForConditionalGeneration(T5Config(**sizes)).eval())


@pytest.mark.parametrize(
    ("make", "batch_sizes", "words"),
    [
        (lambda: torch.nn.Linear(2, 2), (1,), "doesn't run compiled with this backend"),
        (wrapper, (1,), r"generate\(\) of torch\.compile\(model\) runs the plain model"),
        (encoder_decoder, (1,), "decoder with random token ids, and this model is none"),
        (
            lambda: specache_fx.compile(build("gpt2", max_position_embeddings=9)),
            (1,),
            "needs a context of 16 tokens",
        ),
        (lambda: specache_fx.compile(build("llama")).train(), (1,), r"call model\.eval\(\) first"),
        (lambda: None, (), "give whole numbers"),
        (lambda: None, 3, "give whole numbers"),
        (lambda: None, (1, True), "give whole numbers"),
        (lambda: None, (0,), "give whole numbers"),
    ],
    ids=["plain", "wrapper", "encoder-decoder", "short", "training", "none", "number", "bool", "zero"],
)
def test_what_can_not_be_warmed_up(make: Any, batch_sizes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        specache_fx.warm_up(make(), batch_sizes=batch_sizes)

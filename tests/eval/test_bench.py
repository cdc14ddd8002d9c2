"""The bench: every method on the same prompts, against `generate()` and against one forward pass."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MistralForCausalLM

from specache_fx.errors import ConfigError
from specache_fx.eval.bench import Bench, Method
from specache_fx.eval.decode import Greedy, until
from specache_fx.eval.methods import METHODS, Footprint, Generated
from specache_fx.eval.methods.specache import Specache
from specache_fx.eval.outcome import batches, summed_up
from specache_fx.eval.reading import Reader
from specache_fx.eval.sample import Sample, Turn
from specache_fx.eval.tasks import make_samples
from specache_fx.eval.text import read_windows
from specache_fx.examples.needle import MODEL_DIR, make_prompts

LENGTH = 400
KV_BYTES = (
    2 * 2 * 2 * 64 * 4
)  # a token of the needle model: layers, heads, keys and values, channels, float32


def samples(bench: Bench, num_prompts: int = 5, length: int = LENGTH) -> list[Sample]:
    return make_samples("multikey", bench, num_prompts=num_prompts, length=length, seed=1)


@pytest.fixture(scope="module")
def shared():
    """For methods that leave nothing behind."""
    with Bench("needle", dtype="float32") as bench:
        yield bench


def test_full_cache_says_what_generate_says(shared: Bench) -> None:
    asked = samples(shared)
    outcome = shared.run(Method.of("full"), asked, batch_size=2)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    ids = torch.tensor([shared.encode(sample.prompt) for sample in asked])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert list(outcome.predictions) == shared.tokenizer.batch_decode(said[:, ids.shape[1] :])
    assert outcome.score == 1
    # The last token that is generated is never fed.
    assert outcome.device_bytes == outcome.full_bytes == (LENGTH - 1) * KV_BYTES
    assert outcome.ratio == 1
    assert outcome.host_bytes == 0
    assert outcome.decode_ms > 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_specache_at_16_bits_says_what_the_full_cache_says(needle: Bench, text: Path) -> None:
    asked = samples(needle, 2)
    windows = read_windows(needle.tokenizer, text, 250, 2, seed=0)
    full = needle.run(Method.of("full"), asked)
    full_text = needle.perplexity(Method.of("full"), windows, decoded=8)
    exact = needle.run(Method.of("specache", bits=16), asked)
    compiled = needle.model._compiled_call_impl
    assert compiled is not None
    assert exact.predictions == full.predictions
    exact_text = needle.perplexity(Method.of("specache", bits=16), windows, decoded=8)
    assert needle.model._compiled_call_impl is compiled  # it stays, until another method is run
    assert exact_text.perplexity == pytest.approx(full_text.perplexity, rel=1e-3)
    assert exact_text.stats["steps"] == 8
    # The prompts are untouched: the plain model's cache still gives the plain model's answers.
    assert needle.run(Method.of("full"), asked).predictions == full.predictions
    assert needle.model._compiled_call_impl is None


@pytest.mark.usefixtures("fresh_dynamo")
def test_specache_at_1_bit_tells_its_bytes_and_rates(needle: Bench) -> None:
    asked = samples(needle, 2, 700)
    full = needle.run(Method.of("full"), asked)
    low = needle.run(Method.of("specache", bits=1), asked)
    assert low.scores == full.scores
    assert low.ratio < 0.6
    assert low.host_bytes > 0
    assert low.full_bytes == 699 * KV_BYTES
    assert 0 <= low.stats["exact_hit_rate"] <= 1
    assert 0 < low.stats["topk_hit_rate"] <= 1
    assert low.stats["steps"] == 3
    assert low.stats["prefetched_bytes"] == low.stats["prefetched_rows"] * 2 * 64 * 4


def turned(bench: Bench, asked: list[Sample], follow: list[str]) -> list[Sample]:
    return [replace(sample, turns=tuple(Turn(text, sample.answers) for text in follow)) for sample in asked]


def test_turns_are_answered_on_the_cache_of_those_before(shared: Bench) -> None:
    first, second = samples(shared, 2)
    follow = [" ".join(second.prompt.split()[-9:]), " ".join(first.prompt.split()[-2:])]
    (asked,) = turned(shared, [first], follow)
    outcome = shared.run(Method.of("full"), [asked])
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    ids, said = shared.encode(first.prompt), []
    for text in ["", *follow]:
        ids = ids + shared.encode_more(text)
        whole = torch.tensor([ids])
        done = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=4, do_sample=False)
        said.append(shared.tokenizer.decode(done[0, len(ids) :]))
        ids = done[0].tolist()
    assert outcome.predictions == ("\n".join(said),)
    expected = tuple(float(text == first.answers[0]) for text in said)
    assert outcome.turn_scores == (expected,)
    assert outcome.scores == (sum(expected) / 3,)
    assert expected[0] == expected[2] == 1
    assert outcome.device_bytes == outcome.full_bytes == (len(ids) - 1) * KV_BYTES


@pytest.mark.usefixtures("fresh_dynamo")
def test_turns_go_on_in_a_compiled_model(needle: Bench) -> None:
    one, other = samples(needle, 2)
    asked = turned(needle, [one, other], [" ".join(one.prompt.split()[-2:]), other.prompt])
    full = needle.run(Method.of("full"), asked)
    exact = needle.run(Method.of("specache", bits=16), asked)
    assert exact.predictions == full.predictions
    assert exact.turn_scores == full.turn_scores
    assert [len(row) for row in full.turn_scores] == [3, 3]
    assert exact.stats["steps"] == 9


def test_turns_that_do_not_fit_are_refused(english: Bench) -> None:
    sample = Sample("x" * 3000, ("x",), 100, "turns", 4000, turns=(Turn("y" * 900, ("y",)),))
    with pytest.raises(ConfigError, match=r"holds 4,096 tokens: .* has 3,001, and 1,100 are to follow"):
        english.run(Method.of("full"), [sample])


def test_model_whose_attention_is_left_alone_is_an_error_and_no_result(shared: Bench) -> None:
    ids = torch.tensor([shared.encode(sample.prompt) for sample in samples(shared, 1)])
    plain = Reader(shared.model).read(ids).cache
    with pytest.raises(ConfigError, match=r"'specache' leaves this model's attention as it is"):
        Specache("specache", {"bits": 1}).measure(plain)


def test_watch_sees_every_step(shared: Bench) -> None:
    seen = []
    shared.run(
        Method.of("full"),
        samples(shared, 2),
        watch=lambda step, measure: seen.append((step, measure().device_bytes)),
    )
    prompt = LENGTH - 4
    assert seen == [(step, 2 * (prompt + step + 1) * KV_BYTES) for step in range(3)]


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"backend": "quanto", "bits": 4}, True),
        ({"backend": "hqq", "bits": 8}, True),
        ({"backend": "hqq", "bits": 1}, False),
        ({"backend": "fp8"}, True),
    ],
)
def test_quantized_cache_of_transformers_is_counted_by_its_codes(
    options: dict, exact: bool, shared: Bench
) -> None:
    if options["backend"] != "fp8":
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[options["backend"]])
    outcome = shared.run(Method.of("quantized", **options), samples(shared, 2))
    assert (outcome.score == 1) == exact
    bits = options.get("bits", 8)
    values = (LENGTH - 4) * KV_BYTES // 4
    codes, window = values * bits // 8, 3 * KV_BYTES if "bits" in options else 0
    scales = outcome.device_bytes - codes - window
    assert scales > 0
    assert scales <= 2 * 4 * values / 64 if "bits" in options else scales < codes


def test_prompts_are_read_once_and_remembered_up_to_a_limit(shared: Bench) -> None:
    ids = torch.tensor([shared.encode(sample.prompt) for sample in samples(shared, 2)])
    reader = Reader(shared.model)
    first = reader.read(ids)
    assert reader.read(ids.clone()) is first
    assert first.copy() is not first.cache
    assert first.full_bytes(LENGTH) == 2 * LENGTH * KV_BYTES
    small = Reader(shared.model, limit=first.nbytes + 1)
    kept = small.read(ids)
    other = small.read(ids[:, 1:])
    assert small.read(ids[:, 1:]) is other
    assert small.read(ids) is not kept


def test_layers_with_a_window_take_no_more_than_it() -> None:
    config = MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_key_value_heads, config.sliding_window = 1, 8
    read = Reader(MistralForCausalLM(config).eval()).read(torch.ones(1, 5, dtype=torch.long))
    held = read.full_bytes(5)
    assert read.full_bytes(7) == held * 7 // 5
    assert read.full_bytes(100) == read.full_bytes(7)


def test_rows_stop_at_their_stop_token_and_the_batch_at_the_last() -> None:
    def logits(*tokens: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(tokens), 10).float()

    greedy = Greedy(9, frozenset({2}))
    assert greedy.next(logits(5, 2)) is not None
    assert greedy.next(logits(6, 7)) is not None
    assert greedy.next(logits(2, 8)) is None
    assert greedy.ids() == [[5, 6], []]
    assert until([1, 2, 3], frozenset()) == [1, 2, 3]


def test_batches_hold_equal_kinds_in_order() -> None:
    assert list(batches(["a", "b", "a", "a", "b"], 2)) == [[0, 2], [3], [1, 4]]
    with pytest.raises(ConfigError, match="no samples to run"):
        list(batches([], 2))


def test_means_weigh_every_sequence_the_same_and_leave_out_what_is_not_known() -> None:
    def batch(rows: int, device: int, rate: float | None, ms: list[float]) -> tuple[int, Generated]:
        return rows, Generated([], None, Footprint(device * rows, 0, {"rate": rate}), 100 * rows, ms)

    total = summed_up([batch(3, 10, 0.5, [1.0, 9.0]), batch(1, 30, None, [2.0])])
    assert total["device_bytes"] == 15
    assert total["full_bytes"] == 100
    assert total["stats"] == {"rate": 0.5}
    assert total["decode_ms"] == 2
    assert math.isnan(summed_up([batch(1, 1, None, [])])["decode_ms"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "records.txt"
    prompts = make_prompts(4, 298, 20, seed=2)
    answered = zip(prompts.texts, prompts.answer_texts, strict=True)
    file.write_text(" ".join(f"{text} {answer}" for text, answer in answered))
    return file


def test_perplexity_of_the_full_cache_equals_one_forward_pass(text: Path, shared: Bench) -> None:
    windows = read_windows(shared.tokenizer, text, 250, 3, seed=0)
    assert windows.shape == (3, 250)
    outcome = shared.perplexity(Method.of("full"), windows, decoded=20, batch_size=2)
    with torch.inference_mode():
        logits = shared.model(windows).logits[:, -21:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, -20:].flatten())
    assert outcome.perplexity == pytest.approx(expected.exp().item(), rel=1e-4)
    assert outcome.tokens == 60
    assert outcome.device_bytes == 249 * KV_BYTES


def test_windows_follow_the_seed_and_do_not_overlap(text: Path, shared: Bench) -> None:
    ids = shared.encode(text.read_text())
    every = read_windows(shared.tokenizer, text, 101, 12, seed=0)
    assert every[:, 1:].flatten().tolist() == ids[1:1201]
    assert set(every[:, 0].tolist()) == {ids[0]}
    one, again, other = (read_windows(shared.tokenizer, text, 101, 2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_text_that_is_too_short_or_unreadable_is_refused(text: Path, shared: Bench, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"windows of 300: ask for a smaller length or for fewer than 99"):
        read_windows(shared.tokenizer, text, 300, 99, seed=0)
    with pytest.raises(ConfigError, match="can't be read as UTF-8 text"):
        read_windows(shared.tokenizer, tmp_path / "none.txt", 300, 1, seed=0)
    (tmp_path / "words.txt").write_text("other words")
    with pytest.raises(ConfigError, match="Our own models know their own words only"):
        read_windows(shared.tokenizer, tmp_path / "words.txt", 5, 1, seed=0)
    windows = read_windows(shared.tokenizer, text, 50, 1, seed=0)
    with pytest.raises(ConfigError, match="decoded=49: of windows of 50 tokens, 1 to 48 can count"):
        shared.perplexity(Method.of("full"), windows, decoded=49)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Method.of("nothing"), "There is no method 'nothing'. Methods: full, specache, kivi"),
        (Method.of("full", bits=2), "has no option 'bits'. It has no options."),
        (Method.of("quantized", width=2), "has no option 'width'. Valid options: backend, bits"),
        pytest.param(
            Method.of("quantized", backend="quanto", bits=3),
            "has to be one of",
            marks=pytest.mark.skipif(find_spec("optimum") is None, reason="optimum-quanto is not installed"),
        ),
        (Method.of("quantized", backend="other"), "Unknown quantization backend `other`"),
        (Method.of("specache", bits=3), "bits=3 is not valid"),
        (Method.of("specache", policy="kivi"), "is a policy already"),
        (Method.of("specache", topk=3), "Did you mean 'top_k'?"),
        (Method.of("press:snapkv"), "needs either bytes"),
        (Method.of("press:snapkv", bytes=5, ratio=0.5), "needs either bytes"),
        (Method.of("press:snapkv", ratio=1.0), "from 0 to below 1"),
        (Method.of("press:snapkv", bytes=0), "above 0"),
        (Method.of("press:snapkv", window=3), "Valid options: bytes, ratio"),
    ],
)
def test_bad_methods_are_refused_with_a_remedy(method: Method, message: str, shared: Bench) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        shared.run(method, samples(shared, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_offloaded_cache_says_that_it_needs_cuda(shared: Bench) -> None:
    with pytest.raises(ConfigError, match=r"'offloaded' needs a CUDA device.*`full` gives the same answers"):
        shared.run(Method.of("offloaded"), samples(shared, 1))
    with pytest.raises(ConfigError, match='device="cuda": PyTorch finds no CUDA device'):
        Bench("needle", device="cuda")


def test_prompt_longer_than_the_models_context_is_refused(english: Bench) -> None:
    sample = Sample("x" * 4000, ("x",), 100, "single", 4000)
    with pytest.raises(ConfigError, match=r"holds 4,096 tokens: .* has 4,001, and 100 are to follow"):
        english.run(Method.of("full"), [sample])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere"}, "There is no folder /nowhere: give --model"),
        ({"model": "needle", "dtype": "int8"}, "dtype='int8': choose one of bfloat16"),
        ({"model": "needle", "device": "tpu"}, "device='tpu': choose one of auto, cpu, cuda"),
    ],
)
def test_bad_models_are_refused_with_a_remedy(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Bench(options.pop("model"), **options)


def test_every_method_of_the_table_has_a_unique_spelling() -> None:
    assert {"full", "specache", "kivi", "kcache", "quantized", "offloaded"} <= set(METHODS)
    assert all("," not in name and " " not in name for name in METHODS)
    assert str(Method.of("specache", bits=1, top_k=8)) == "specache bits=1 top_k=8"
    assert Method.of("full") == Method("full")


def test_english_model_runs_from_its_folder(english: Bench) -> None:
    asked = make_samples("single", english, num_prompts=2, length=800, seed=0)
    outcome = english.run(Method.of("full"), asked)
    assert len(outcome.predictions) == 2
    assert isinstance(english.model.config, LlamaConfig)
    assert english.max_context == 4096

"""Methods on prompts and on a text, against `generate()` and against one forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import nightly_unless
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from specache_bench.decode import Forced, Greedy, Sampled
from specache_bench.lab import Kept, Lab, Read
from specache_bench.methods import METHODS, Footprint, Generated, Specache, read_methods
from specache_bench.records import Method, read_spelling
from specache_bench.tasks import Sample
from specache_bench.tasks.building import Turn
from specache_bench.workloads import Continuations, Prompts, Windows, answer, batches, read_windows, summed_up
from specache_fx.compiled import uncompiled
from specache_fx.errors import ConfigError
from specache_fx.examples.suite import MODEL_DIR

LENGTH = 400
FULL = Method.of("full")
EXACT = Method.of("specache", bits=16)


def prompts(number: int = 3, length: int = LENGTH) -> Prompts:
    return Prompts("multikey", length, number, 1)


def token_bytes(lab: Lab) -> int:
    config = lab.model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * lab.head_dim * 4


def test_full_cache_says_what_generate_says(suite: Lab) -> None:
    asked = prompts().samples(suite)
    found = prompts().run(suite, FULL)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    for sample, said in zip(asked, found["predictions"], strict=True):
        ids = torch.tensor([suite.encode(sample.prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=sample.max_new_tokens, do_sample=False
        )
        assert said == suite.decode(out[0, ids.shape[1] :].tolist())
    assert found["score"] == 1 == found["ratio"] and found["host_bytes"] == 0
    # The last token that is chosen is never fed.
    assert (
        found["device_bytes"]
        == found["full_bytes"]
        <= (LENGTH + asked[0].max_new_tokens) * token_bytes(suite)
    )
    assert found["decode_ms"] > 0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, suite: Lab) -> str:
    file = tmp_path_factory.mktemp("text") / "records.txt"
    file.write_text(
        " ".join(sample.prompt.removeprefix("<bos>") for sample in prompts(4, 300).samples(suite))
    )
    return str(file)


def test_perplexity_of_the_full_cache_equals_one_forward_pass(suite: Lab, text: str) -> None:
    found = Windows(text, 250, 3, 0, 20).run(suite, FULL)
    windows = read_windows(suite, text, 250, 3, 0)
    with torch.inference_mode():
        logits = suite.model(windows).logits[:, -21:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, -20:].flatten())
    assert found["perplexity"] == pytest.approx(expected.exp().item(), rel=1e-4)
    assert found["tokens"] == 60 and found["kl"] == 0 and found["same_top"] == 1
    assert found["device_bytes"] == 249 * token_bytes(suite)


def test_continuation_with_the_full_cache_is_its_own(suite: Lab, text: str) -> None:
    windows = read_windows(suite, text, 100, 3, 0)
    for sampled in (False, True):
        found = Continuations(text, 100, 3, 0, 12, sampled).run(suite, FULL)
        assert found["until_differences"] == [1, 1, 1]
        chooser = Sampled(12, 0) if sampled else Greedy(12)
        ids = torch.cat([windows, suite.answer(windows, chooser)], dim=1)
        with torch.inference_mode():
            logits = suite.model(ids).logits[:, -12:-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -11:].flatten())
        assert found["full_loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_continuation_ends_to_be_the_full_caches_at_the_first_other_token(suite: Lab, text: str) -> None:
    found = Continuations(text, 250, 4, 0, 60).run(
        suite, Method.of("kivi", bits=1, residual_length=8, group_size=8)
    )
    assert all(0 <= share < 1 for share in found["until_differences"])
    full = Continuations(text, 250, 4, 0, 60).run(suite, FULL)
    assert full["full_loss"] < found["full_loss"]


def test_drawn_tokens_have_the_frequencies_of_their_probabilities() -> None:
    probabilities = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 1.0, 0.0, 0.0]])
    chooser = Sampled(4000, 1)
    for _ in range(4000):
        chooser.next(probabilities.log())
    first, second = map(torch.tensor, chooser.ids())
    counts = first.bincount(minlength=4) / 4000
    torch.testing.assert_close(counts, probabilities[0], atol=0.03, rtol=0)
    assert counts[1] == 0 and bool((second == 1).all())


def test_windows_follow_the_seed_and_do_not_overlap(suite: Lab, text: str) -> None:
    ids = suite.encode(Path(text).read_text())
    opening = len(suite.encode(""))
    step = 101 - opening
    count = (len(ids) - opening) // step
    every = read_windows(suite, text, 101, count, 0)
    assert every[:, opening:].flatten().tolist() == ids[opening : opening + count * step]
    one, again, other = (read_windows(suite, text, 101, 2, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_texts_that_can_not_be_measured_are_refused(suite: Lab, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"windows of 300: ask for a smaller length or for fewer than 99"):
        read_windows(suite, text, 300, 99, 0)
    with pytest.raises(ConfigError, match="can't be read as UTF-8 text"):
        read_windows(suite, str(tmp_path / "none.txt"), 300, 1, 0)
    (tmp_path / "words.txt").write_text("other words")
    with pytest.raises(ConfigError, match="Our own models know their own words only"):
        read_windows(suite, str(tmp_path / "words.txt"), 5, 1, 0)
    with pytest.raises(ConfigError, match="decoded=49: of windows of 50 tokens, 1 to 48 can count"):
        Windows(text, 50, 1, 0, 49).check(suite)


def turned(samples: list[Sample], follow: list[str]) -> list[Sample]:
    return [replace(sample, turns=tuple(Turn(text, sample.answers) for text in follow)) for sample in samples]


@pytest.fixture(scope="module", params=nightly_unless(FULL.__eq__, [FULL, EXACT]), ids=str)
def method(request: pytest.FixtureRequest) -> Method:
    """Pytest runs the tests of one after those of the other: what is compiled serves all of them."""
    found: Method = request.param
    return found


def test_turns_are_answered_on_the_cache_of_those_before(two_layers: Lab, method: Method) -> None:
    first, second = prompts(2).samples(two_layers)
    follow = [" ".join(second.prompt.split()[-9:]), " ".join(first.prompt.split()[-2:])]
    (asked,) = turned([first], follow)
    found = answer(two_layers, method, [asked])
    ids, said = two_layers.encode(first.prompt), []
    for text in ["", *follow]:
        ids = ids + two_layers.encode_more(text)
        whole, count = torch.tensor([ids]), first.max_new_tokens
        with uncompiled(two_layers.model):
            done = two_layers.model.generate(
                whole, attention_mask=torch.ones_like(whole), max_new_tokens=count, do_sample=False
            )
        new = done[0, len(ids) :].tolist()
        ends = [place for place, token in enumerate(new) if token in two_layers.stop_ids]
        said.append(two_layers.decode(new[: ends[0]] if ends else new))
        ids = ids + new
    assert found["predictions"] == ["\n".join(said)]
    assert len(found["turn_scores"][0]) == 3 and found["scores"][0] == sum(found["turn_scores"][0]) / 3
    assert found["turn_scores"][0][0] == 1


def test_question_that_follows_its_context_is_answered_as_one_prompt(two_layers: Lab, method: Method) -> None:
    count = 2 if method == FULL else 1  # another batch is another graph
    samples = Prompts("multikey", LENGTH, count, 2).samples(two_layers)  # which two layers answer
    words = [sample.prompt.split() for sample in samples]
    parted = [
        replace(sample, context=" ".join(one[:-9]), question=" " + " ".join(one[-9:]))
        for sample, one in zip(samples, words, strict=True)
    ]
    whole, apart = (answer(two_layers, method, parted, agnostic) for agnostic in (False, True))
    assert apart["predictions"] == whole["predictions"] and whole["score"] == 1
    assert apart["full_bytes"] == whole["full_bytes"]


def test_specache_at_16_bits_says_what_the_full_cache_says(two_layers: Lab, text: str) -> None:
    windows = Windows(text, 250, 2, 0, 8)
    low = prompts(2).run(two_layers, EXACT)
    compiled = two_layers.model._compiled_call_impl
    assert compiled is not None
    found = windows.run(two_layers, EXACT)
    assert two_layers.model._compiled_call_impl is compiled  # it stays, until another method is run
    # The prompts are untouched: the plain model's cache still gives the plain model's answers.
    full, full_text = prompts(2).run(two_layers, FULL), windows.run(two_layers, FULL)
    assert two_layers.model._compiled_call_impl is None
    assert low["predictions"] == full["predictions"]
    assert found["perplexity"] == pytest.approx(full_text["perplexity"], rel=1e-3)
    assert found["kl"] < 1e-6 and found["same_top"] == 1 and found["stats"]["steps"] == 8


def test_low_bits_tell_bytes_rates_and_divergence(two_layers: Lab, text: str) -> None:
    one_bit = Method.of("specache", bits=1, lookahead="token")
    full, low = (prompts(2, 700).run(two_layers, method) for method in (FULL, one_bit))
    assert low["ratio"] < 0.6 and low["host_bytes"] > 0 and low["full_bytes"] == full["full_bytes"]
    stats = low["stats"]
    assert 0 <= stats["exact_hit_rate"] <= 1 and 0 < stats["topk_hit_rate"] <= 1
    pair = 2 * two_layers.head_dim * 4
    assert stats["prefetched_bytes"] == stats["prefetched_rows"] * pair
    found = Windows(text, 250, 2, 0, 20).run(two_layers, one_bit)
    assert found["kl"] > 1e-3 and found["same_top"] < 1
    assert len(found["kls"]) == 2 and found["kl"] == sum(found["kls"]) / 2


def test_prompts_that_do_not_fit_are_refused(english: Lab) -> None:
    with pytest.raises(ConfigError, match=r"holds 4,096 tokens: .* has 4,\d+, and \d+ are to follow"):
        Prompts("single", 4500, 1, 0).samples(english)


def test_model_whose_attention_is_left_alone_is_an_error_and_no_result(suite: Lab) -> None:
    plain = suite.read(torch.tensor([suite.encode(prompts(1).samples(suite)[0].prompt)])).cache
    with pytest.raises(ConfigError, match=r"'specache' leaves this model's attention as it is"):
        Specache("specache", {"bits": 1}).measure(plain)


@pytest.mark.parametrize(("backend", "bits"), [("quanto", 4), ("hqq", 8), ("hqq", 1), ("fp8", None)])
def test_quantized_cache_of_transformers_is_counted_by_its_codes(
    backend: str, bits: int | None, suite: Lab
) -> None:
    if backend != "fp8":
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
    options = {"backend": backend} if bits is None else {"backend": backend, "bits": bits}
    found = prompts(2).run(suite, Method.of("quantized", **options))
    # Codes of the prompt and, at 16 bits, of what followed; then scales and zeros.
    assert (bits or 8) / 32 < found["ratio"] < (bits or 8) / 32 + 0.12


def test_prompts_are_read_once_and_remembered_up_to_a_limit(suite: Lab) -> None:
    ids = torch.tensor([suite.encode(sample.prompt) for sample in prompts(2).samples(suite)])
    first = suite.read(ids)
    assert suite.read(ids.clone()) is first and first.copy() is not first.cache
    assert first.full_bytes(LENGTH) == 2 * LENGTH * token_bytes(suite)
    small = Kept(first.nbytes + 1)
    kept = small.get("a", lambda: first)
    other = small.get("b", lambda: Read(first.cache, first.logits, first.prompt_len))
    assert small.get("b", lambda: first) is other
    assert small.get("a", lambda: other) is other and kept is first


def test_layers_with_a_window_take_no_more_than_it() -> None:
    config = MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_key_value_heads, config.sliding_window = 1, 8
    out = MistralForCausalLM(config).eval()(torch.ones(1, 5, dtype=torch.long), use_cache=True)
    read = Read(out.past_key_values, out.logits[:, -1], 5)
    held = read.full_bytes(5)
    assert read.full_bytes(7) == held * 7 // 5 and read.full_bytes(100) == read.full_bytes(7)


def test_rows_stop_at_their_stop_token_and_the_batch_at_the_last() -> None:
    def logits(*tokens: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(tokens), 10).float()

    greedy = Greedy(9, frozenset({2}))
    assert greedy.next(logits(5, 2)) is not None
    assert greedy.next(logits(6, 7)) is not None
    assert greedy.next(logits(2, 8)) is None
    assert greedy.ids() == [[5, 6], []]


def test_divergence_is_that_of_the_two_distributions() -> None:
    random = torch.Generator().manual_seed(0)
    full, own = (torch.randn(2, 5, 300, generator=random) for _ in range(2))
    tokens, kept = torch.randint(300, (2, 6), generator=random), torch.empty(2, 5, 300)
    chooser = Forced(tokens, torch.log_softmax(full, dim=-1), kept)
    chooser.next(own[:, 0])  # of the first token, which is prefill's
    for step in range(5):
        chooser.next(own[:, step])
    of = [torch.distributions.Categorical(logits=logits.double()) for logits in (full, own)]
    kl, same_top = chooser.kl(), chooser.same_top()
    assert kl is not None and same_top is not None
    torch.testing.assert_close(kl.double(), torch.distributions.kl_divergence(*of), rtol=1e-5, atol=1e-6)
    assert torch.equal(same_top, full.argmax(-1) == own.argmax(-1))
    assert torch.equal(chooser.losses(), -kept.gather(2, tokens[:, 1:, None])[..., 0])


def test_means_weigh_every_sequence_the_same_and_leave_out_what_is_not_known() -> None:
    def batch(rows: int, device: int, rate: float | None, ms: list[float]) -> tuple[int, Generated]:
        return rows, Generated([], Footprint(device * rows, 0, {"rate": rate}), 100 * rows, ms)

    total = summed_up([batch(3, 10, 0.5, [1.0, 9.0]), batch(1, 30, None, [2.0])], 0.0)
    assert (total["device_bytes"], total["full_bytes"], total["decode_ms"]) == (15, 100, 2)
    assert total["stats"] == {"rate": 0.5}
    assert summed_up([batch(1, 1, None, [])], 0.0)["decode_ms"] is None
    assert list(batches(["a", "b", "a", "a", "b"], 2)) == [[0, 2], [3], [1, 4]]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("nothing", "There is no method 'nothing'. Methods: full, roomy"),
        ("full,bits=2", "has no option 'bits'. It has no options."),
        ("quantized,width=2", "has no option 'width'. Valid options: backend, bits"),
        ("specache,bits=3", "bits=3 is not valid"),
        ("specache,policy=kivi", "is a policy already"),
        ("roomy,room=x", "'roomy': room=x: give a whole number >= 0"),
        ("roomy,room=-1", "'roomy': room=-1: give a whole number >= 0"),
        ("press:h2o,ratio=abc", "ratio=abc: give a number"),
        ("press:h2o,ratio=2", "ratio=2: give a number from 0 to below 1"),
        ("press:h2o,ratio=0.5,bytes=3", "needs either bytes"),
    ],
)
def test_bad_methods_are_named_before_the_work(method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        read_methods([method], [])


def test_methods_that_can_not_answer_here_say_so(suite: Lab) -> None:
    with pytest.raises(ConfigError, match="is timed alone"):
        prompts(1).run(suite, Method.of("openvino"))
    assert set(METHODS) > {
        "full",
        "compiled",
        "specache",
        "kivi",
        "kcache",
        "quantized",
        "llama.cpp",
        "press:snapkv",
    }


def test_room_ahead_changes_no_answer(suite: Lab, text: str) -> None:
    full, roomy = (prompts(2).run(suite, Method.of(name)) for name in ("full", "roomy"))
    assert roomy["predictions"] == full["predictions"] and roomy["device_bytes"] == full["device_bytes"]
    for room in (0, 3):  # it is full before the end
        found = Windows(text, 250, 2, 0, 20).run(suite, Method.of("roomy", room=room))
        assert found["kl"] < 1e-6 and found["device_bytes"] == 249 * token_bytes(suite)


def test_widths_go_to_those_that_have_none_and_presses_come_last() -> None:
    given = ["press:snapkv", "full", "specache", "kivi,bits=4", "press:tova,ratio=0.5"]
    assert read_methods(given, [1, 2]) == [
        FULL,
        Method.of("specache", bits=1),
        Method.of("specache", bits=2),
        Method.of("kivi", bits=4),
        Method.of("press:tova", ratio=0.5),
        Method.of("press:snapkv"),
    ]
    with pytest.raises(ConfigError, match="full is given twice"):
        read_methods(["full", "full"], [])


def test_spelling_is_read() -> None:
    read = read_spelling("specache,strict=true,host=disk, x=None,bits=1")
    assert read == ("specache", {"strict": True, "host": "disk", "x": None, "bits": 1})
    for bad in ("full,bits", "full,=1", "full,bits=1,bits=2"):
        with pytest.raises(ConfigError, match=r"is no option|given twice"):
            read_spelling(bad)

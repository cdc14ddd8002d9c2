"""A method on a text beside the full cache: divergence, agreement, and how likely its own continuation is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specache_fx.errors import ConfigError
from specache_fx.eval.bench import Bench, Method
from specache_fx.eval.decode import Forced, Sampled, Sampling
from specache_fx.eval.reading import Reader
from specache_fx.eval.reference import Reference
from specache_fx.eval.text import read_windows
from specache_fx.examples.needle import make_prompts

FULL, LOW = Method.of("full"), Method.of("kivi", bits=1)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench("needle", dtype="float32") as bench:
        yield bench


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory, bench: Bench) -> torch.Tensor:
    file = tmp_path_factory.mktemp("text") / "records.txt"
    file.write_text(" ".join(make_prompts(4, 298, 20, seed=2).texts))
    return read_windows(bench.tokenizer, file, 250, 3, seed=0)


def test_divergence_is_that_of_the_two_distributions() -> None:
    random = torch.Generator().manual_seed(0)
    full, own = (torch.randn(2, 5, 300, generator=random) for _ in range(2))
    tokens = torch.randint(300, (2, 6), generator=random)
    chooser = Forced(tokens, torch.log_softmax(full, dim=-1))
    chooser.next(own[:, 0])  # of the first token, which is prefill's
    for step in range(5):
        chooser.next(own[:, step])
    beside = chooser.against_full()
    assert beside is not None
    of = [torch.distributions.Categorical(logits=logits.double()) for logits in (full, own)]
    expected = torch.distributions.kl_divergence(*of)
    torch.testing.assert_close(beside.kl.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(beside.same_top, full.argmax(-1) == own.argmax(-1))
    assert torch.equal(chooser.losses(), -torch.log_softmax(own, -1).gather(2, tokens[:, 1:, None])[..., 0])


def test_full_cache_does_not_diverge_from_itself(bench: Bench, windows: torch.Tensor) -> None:
    outcome = bench.perplexity(FULL, windows, decoded=20, batch_size=2)
    assert outcome.kl == 0
    assert outcome.same_top == 1
    assert [len(row) for row in outcome.kl_at or []] == [20, 20, 20]
    for row, mean in zip(outcome.loss_at, outcome.losses, strict=True):
        assert sum(row) / 20 == pytest.approx(mean, abs=1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_low_bit_cache_diverges_at_each_position(needle: Bench, windows: torch.Tensor) -> None:
    outcome = needle.perplexity(LOW, windows, decoded=20, batch_size=2)
    assert outcome.kl is not None
    assert outcome.kl > 1e-3
    assert outcome.same_top is not None
    assert outcome.same_top < 1
    assert outcome.kl == pytest.approx(sum(map(sum, outcome.kl_at)) / 60)
    assert [len(row) for row in outcome.same_top_at or []] == [20, 20, 20]


@pytest.mark.usefixtures("fresh_dynamo")
def test_specache_at_16_bits_does_not_diverge(needle: Bench, windows: torch.Tensor) -> None:
    outcome = needle.perplexity(Method.of("specache", bits=16), windows, decoded=8)
    assert outcome.kl is not None
    assert outcome.kl < 1e-6
    assert outcome.same_top == 1
    went_on = needle.continuation(Method.of("specache", bits=16), windows[:, :200], new_tokens=8)
    assert went_on.agreement == went_on.until_difference == (1, 1, 1)


def test_distributions_are_kept_up_to_a_limit(bench: Bench, windows: torch.Tensor) -> None:
    prompts, forced = windows[:, :200], windows[:, 200:206]
    reader = Reader(bench.model)
    kept = Reference(bench.model, reader)
    found = kept.log_probs(prompts, forced)
    assert kept.log_probs(prompts.clone(), forced) is found
    assert found.shape == (3, 5, bench.model.config.vocab_size)
    short = Reference(bench.model, reader, limit=found.nbytes)
    first = short.log_probs(prompts, forced)
    assert short.log_probs(prompts, forced) is first
    short.log_probs(prompts, windows[:, 200:205])
    assert short.log_probs(prompts, forced) is not first
    torch.testing.assert_close(short.log_probs(prompts, forced), first)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=3)])
def test_full_cache_goes_on_as_itself_and_is_scored_as_one_forward_pass(
    bench: Bench, windows: torch.Tensor, sampling: Sampling | None
) -> None:
    outcome = bench.continuation(FULL, windows, new_tokens=40, sampling=sampling, batch_size=2)
    assert outcome.agreement == outcome.until_difference == (1, 1, 1)
    whole = torch.cat([windows, torch.tensor(outcome.ids)], dim=1)
    with torch.inference_mode():
        logits = bench.model(whole).logits[:, -41:-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), whole[:, -40:], reduction="none")
    assert outcome.losses == pytest.approx(expected.mean(dim=1).tolist(), rel=1e-4)


@pytest.mark.usefixtures("fresh_dynamo")
def test_low_bit_cache_goes_on_otherwise_and_less_likely(needle: Bench, windows: torch.Tensor) -> None:
    full = needle.continuation(FULL, windows, new_tokens=40)
    low = needle.continuation(LOW, windows, new_tokens=40)
    assert sum(low.agreement) < 3
    assert all(until <= share for until, share in zip(low.until_difference, low.agreement, strict=True))
    for ours, theirs, share in zip(low.ids, full.ids, low.agreement, strict=True):
        assert share == sum(a == b for a, b in zip(ours, theirs, strict=True)) / 40
    assert sum(low.losses) > sum(full.losses)


def test_random_tokens_follow_the_distribution_and_the_seed() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20_000, 4)

    def drawn(seed: int) -> torch.Tensor:
        chooser = Sampled(1, frozenset(), Sampling(temperature=2.0, seed=seed))
        chooser.next(logits)
        return torch.tensor(chooser.ids())[:, 0]

    shares = drawn(0).bincount(minlength=4) / len(logits)
    torch.testing.assert_close(shares, torch.softmax(logits[0] / 2, dim=0), rtol=0, atol=0.02)
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_what_cannot_be_generated_is_refused(bench: Bench, windows: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="new_tokens=0: give a whole number >= 1"):
        bench.continuation(FULL, windows, new_tokens=0)
    with pytest.raises(ConfigError, match=r"temperature=0: give a number above 0"):
        bench.continuation(FULL, windows, sampling=Sampling(0, 0))
    with pytest.raises(ConfigError, match=r"holds 16,384 tokens: a window has 250, and 20,000 are to follow"):
        bench.continuation(FULL, windows, new_tokens=20_000)

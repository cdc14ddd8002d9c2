"""The suite's tasks and its committed model: what the experiments rest on."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from specache_fx.errors import ConfigError
from specache_fx.examples.suite import MODEL_DIR, TASKS, Sample, build_tokenizer, make_samples, score, train
from specache_fx.examples.suite.batches import IGNORE, KINDS, make_batch
from specache_fx.examples.suite.evaluate import answer
from specache_fx.examples.suite.model import build_model
from specache_fx.examples.suite.progress import Progress
from specache_fx.examples.suite.publish import table
from specache_fx.examples.suite.train import parse_emphasis, parse_lengths
from specache_fx.examples.suite.words import BOS, FIRST_KEY, PAD, VOCAB_SIZE, WORDS, to_text

seeds = st.integers(0, 2**32)
depths = st.sampled_from((0.0, 0.25, 0.5, 1.0))


def one(
    task: str, length: int, seed: int, depth: float | None = None, **knobs: int
) -> tuple[Sample, list[str]]:
    (sample,) = make_samples(task, 1, length, seed, depth, **knobs)
    return sample, sample.prompt.split()


def places(words: list[str], wanted: list[str]) -> list[int]:
    """Where a run of words begins."""
    return [i for i in range(len(words)) if words[i : i + len(wanted)] == wanted]


def is_filler(word: str) -> bool:
    return word.startswith("w") and word[1:].isdigit()


@given(task=st.sampled_from(sorted(TASKS)), length=st.integers(450, 700), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_prompts_have_the_length_asked_for_and_their_answers_in_them(task, length, seed):
    sample, words = one(task, length, seed)
    assert len(words) == length - 1  # <bos> is the tokenizer's
    assert (sample.task, sample.length, sample.depth) == (task, length, None)
    assert set(words) <= set(WORDS)
    for wanted in sample.answers:
        found = places(words, wanted.split())
        # Words that are counted or referred to occur often; whatever was stored occurs once.
        assert len(found) >= 1 if task in ("frequent", "tracking") else len(found) == 1


@given(seed=seeds, depth=depths, task=st.sampled_from(("single", "multikey", "copying")))
@settings(max_examples=25, deadline=None)
def test_depth_is_where_the_answer_lies(seed, depth, task):
    sample, words = one(task, 600, seed, depth)
    (place,) = places(words, sample.answers[0].split())
    fillers = [is_filler(word) for word in words]
    assert sample.depth == depth
    assert sum(fillers[:place]) == round(depth * sum(fillers))


@given(seed=seeds, num_keys=st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_multikey_asks_for_one_of_its_records(seed, num_keys):
    sample, words = one("multikey", 512, seed, num_keys=num_keys)
    assert words[-2] == "|"
    record, question = places(words, words[-2:])
    assert " ".join(words[record + 2 : record + 6]) == sample.answers[0]
    assert question == len(words) - 2
    assert words.count("|") == num_keys + 1
    assert sample.max_new_tokens == 4


@given(seed=seeds, num_values=st.integers(2, 8), num_keys=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_multivalue_asks_for_every_value_of_a_key_in_order(seed, num_values, num_keys):
    sample, words = one("multivalue", 512, seed, num_values=num_values, num_keys=num_keys)
    stored = places(words, words[-2:])[:-1]
    assert [words[i + 2] for i in stored] == [f"#{i + 1}" for i in range(num_values)]
    assert [" ".join(words[i + 3 : i + 5]) for i in stored] == list(sample.answers)
    assert words.count("|") == num_values * num_keys + 1


@given(seed=seeds, num_queries=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_multiquery_answers_in_the_order_of_its_question(seed, num_queries):
    sample, words = one("multiquery", 512, seed, num_queries=num_queries)
    question = words[words.index("?") + 1 : -1]
    assert words[-1] == "!"
    assert question[::3] == [f"q{i + 1}" for i in range(num_queries)]
    for key, wanted in zip(question[2::3], sample.answers, strict=True):
        record = places(words, ["|", key])[0]
        assert " ".join(words[record + 2 : record + 6]) == wanted


@given(seed=seeds, hops=st.integers(0, 8), num_chains=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_tracking_answers_are_the_variables_that_hold_the_value(seed, hops, num_chains):
    sample, words = one("tracking", 512, seed, hops=hops, num_chains=num_chains)
    held: dict[str, str] = {}
    for i in places(words, ["let"]):
        assert words[i + 2] == "="
        assert words[i + 1] not in held
        # A statement refers to what was said before it, as in a program.
        held[words[i + 1]] = held.get(words[i + 3], words[i + 3])
    assert tuple(x for x, value in held.items() if value == words[-1]) == sample.answers
    assert len(held) == num_chains * (hops + 1)


@given(seed=seeds, length=st.integers(64, 600))
@settings(max_examples=25, deadline=None)
def test_frequent_answers_are_the_three_most_frequent_words(seed, length):
    sample, words = one("frequent", length, seed)
    (first, a), (second, b), (third, c), (_, d) = Counter(words[:-1]).most_common(4)
    assert sample.answers == (first, second, third)
    assert a > b > c > d


@given(seed=seeds, num_words=st.integers(1, 128))
@settings(max_examples=25, deadline=None)
def test_copying_asks_for_the_passage_that_follows_its_name(seed, num_words):
    sample, words = one("copying", 400, seed, num_words=num_words)
    start = places(words, words[-2:])[0] + 2
    assert words[start : start + num_words] == sample.answers[0].split()
    assert words[start + num_words] == "]"
    assert len(set(words[start : start + num_words])) == num_words == sample.max_new_tokens


@given(seed=seeds, num_queries=st.integers(2, 7))
@settings(max_examples=25, deadline=None)
def test_topics_moves_from_the_beginning_to_the_middle_to_the_end(seed, num_queries):
    sample, words = one("topics", 600, seed, num_queries=num_queries)
    found = [places(words, wanted.split())[0] for wanted in sample.answers]
    before, after = num_queries // 2, num_queries - num_queries // 2
    assert max(found[:before]) < min(found[before:-after])
    assert max(found[before:-after]) < min(found[-after:])
    assert sample.max_new_tokens == 7 * num_queries + 3 + 24 + 1


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_prompts(task):
    first, again, other = (make_samples(task, 3, 500, seed) for seed in (7, 7, 8))
    assert first == again
    assert first[:2] == make_samples(task, 2, 500, 7)
    assert not {sample.prompt for sample in first} & {sample.prompt for sample in other}
    assert len({sample.prompt for sample in first}) == 3


@pytest.mark.parametrize(
    ("task", "knobs", "message"),
    [
        ("niddle", {}, "no task 'niddle'; the tasks are single"),
        ("single", {"num_keys": 3}, "'single' has no option 'num_keys'; its options are: none"),
        ("multikey", {"num_values": 3}, "its options are: num_keys"),
        ("multikey", {"num_keys": 0}, "num_keys must be 1 or more"),
        ("multikey", {"num_keys": 129, "length": 2000}, "has 128 keys"),
        ("multikey", {"length": 100}, "240 tokens and 97 are free"),
        ("multikey", {"depth": 1.5}, "between 0 and 1"),
        ("multivalue", {"num_values": 9}, "between 2 and 8"),
        ("multiquery", {"num_queries": 9, "num_keys": 24}, "between 1 and 8"),
        ("multiquery", {"num_queries": 4, "num_keys": 3}, "num_keys must be 4 or more"),
        ("multiquery", {"depth": 0.5}, "it can for single, multikey, copying"),
        ("tracking", {"hops": 64}, "needs 65 variables and 64 are left"),
        ("tracking", {"hops": -1}, "hops=-1"),
        ("copying", {"num_words": 129}, "between 1 and 128"),
        ("topics", {"num_queries": 1}, "num_queries must be 2 or more"),
        ("frequent", {"length": 40}, "too short"),
        ("single", {"seed": -1}, "can't be negative"),
    ],
)
def test_samples_refused_when_impossible(task, knobs, message):
    with pytest.raises(ConfigError, match=message):
        make_samples(**{"task": task, "num_prompts": 1, "length": 500, "seed": 0} | knobs)


def sample_of(task: str, *answers: str) -> Sample:
    return Sample("", answers, 8, task, 100)


@pytest.mark.parametrize(
    ("task", "answers", "generated", "expected"),
    [
        ("multiquery", ("v1 v2", "v3 v4"), "q1 v1 v2 q2 v3 v4", 1.0),
        ("multiquery", ("v1 v2", "v3 v4"), "q1 v3 v4 q2 v2 v1", 0.5),
        ("multikey", ("v1 v2",), "v1 v22", 0.0),
        ("multikey", ("v1 v2",), "", 0.0),
        ("frequent", ("v1", "v2", "v3"), "v2 v1 v9", 2 / 3),
        ("copying", ("v1 v2 v3 v4",), "v1 v9 v3", 0.5),
        ("copying", ("v1 v2 v3 v4",), "v2 v3 v4", 0.0),
        ("copying", ("v1 v2 v3 v4",), "v1 v2 v3 v4 v5", 1.0),
    ],
)
def test_score(task, answers, generated, expected):
    assert score(sample_of(task, *answers), generated) == expected


@given(seed=seeds, span=st.sampled_from((256, 4096)))
@settings(max_examples=10, deadline=None)
def test_batches_ask_for_what_their_context_holds(seed, span):
    shares = dict.fromkeys(KINDS, 1.0)
    batch = make_batch(6, 256, span, shares, Random(seed))
    assert batch.ids.shape == batch.positions.shape == batch.kinds.shape == (6, 256)
    assert (batch.positions.diff(dim=1) >= 1).all()
    assert int(batch.positions[batch.ids != PAD].max()) < max(span, 256)
    for row, kinds in zip(batch.ids.tolist(), batch.kinds.tolist(), strict=True):
        assert row[0] == BOS
        assert all(row[i] in row[:i] for i, kind in enumerate(kinds) if kind != IGNORE)


def test_batches_ask_for_each_kind():
    batch = make_batch(64, 256, 256, dict.fromkeys(KINDS, 1.0), Random(0))
    assert set(batch.kinds.flatten().tolist()) == {IGNORE, *range(len(KINDS))}


def test_training_goes_on_from_a_saved_run(tmp_path):
    short = {"minutes": 0.001, "tokens": 256, "threads": torch.get_num_threads()}
    train.main(tmp_path / "a", **short)
    train.main(tmp_path / "b", **short, lengths="256", span=1024, resume=tmp_path / "a")
    runs = json.loads((tmp_path / "b" / "training.json").read_text(encoding="utf-8"))["runs"]
    assert [run["steps"] >= 1 for run in runs] == [True, True]
    assert "--resume" not in runs[0]["command"]
    assert "--lengths 256 --span 1024" in runs[1]["command"]
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)
    # A step changes the weights by little: the second run began with the first one's.
    assert torch.allclose(first.lm_head.weight, second.lm_head.weight, atol=1e-3)


@pytest.mark.parametrize("lengths", ["", "64", "256,", "a"])
def test_training_refuses_lengths_that_are_none(lengths):
    with pytest.raises(ConfigError, match="from 128 on"):
        parse_lengths(lengths)


@pytest.mark.parametrize("emphasis", ["passage", "records=2", "passage=x"])
def test_training_refuses_an_emphasis_that_is_none(emphasis):
    with pytest.raises(ConfigError, match="the kinds: record, numbered"):
        parse_emphasis(emphasis)


def test_training_draws_more_of_what_is_answered_worse():
    progress = Progress()
    assert max(progress.shares(), key=progress.shares().__getitem__) == "span"
    progress.accuracy |= {"span": 0.9, "record": 1.0, "chain": 0.5}
    shares = progress.shares()
    assert shares["span"] == 0.0
    assert shares["record"] < shares["chain"] < shares["plan"]


def test_training_loss_counts_kinds_alike_whatever_their_answers_are_long():
    kinds = torch.tensor([0] * 400 + [3] * 40)
    losses = torch.cat([torch.full((400,), 1.0), torch.full((40,), 3.0)])
    progress = Progress()
    assert progress.update(losses, torch.ones(440, dtype=torch.bool), kinds).item() == pytest.approx(2.0)
    assert progress.accuracy["record"] == progress.accuracy["passage"] > progress.accuracy["chain"] == 0.0


def test_untrained_heads_look_back():
    model = build_model()
    model.set_attn_implementation("eager")
    ids = torch.randint(FIRST_KEY, VOCAB_SIZE, (1, 200), generator=torch.Generator().manual_seed(0))
    attention = model(ids, output_attentions=True).attentions[0][0]
    for head, offset in enumerate((1, 2, 3)):
        assert attention[head].diagonal(-offset).mean() > 0.7


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


@pytest.mark.parametrize("source", ["built", "committed"])
def test_tokenizer_round_trip(source, request):
    tokenizer = build_tokenizer() if source == "built" else request.getfixturevalue("tokenizer")
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE)) == list(WORDS)
    for task in TASKS:
        sample, _ = one(task, 500, 3)
        ids = tokenizer(sample.prompt).input_ids
        assert len(ids) == 500
        assert ids[0] == BOS
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample.prompt == to_text(ids)


def test_model_answers_unseen_prompts(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, local_files_only=True, dtype=torch.float32)
    trained = json.loads((MODEL_DIR / "training.json").read_text(encoding="utf-8"))["tasks"]
    for task in trained:
        samples = make_samples(task, 3, 1024, seed=100)
        texts = answer(model, samples, tokenizer)
        assert sum(map(score, samples, texts)) / len(samples) >= 0.8, task


def test_model_folder_is_small_and_records_its_training():
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 10_000_000
    training = json.loads((MODEL_DIR / "training.json").read_text(encoding="utf-8"))
    card = (MODEL_DIR / "README.md").read_text(encoding="utf-8")
    assert table(training["scores"]) in card
    # What the card calls its tasks are those that it answers at 4,096 tokens.
    assert len(training["tasks"]) >= 5
    for dtype in ("float32", "bfloat16"):
        long = {row["task"]: row["score"] for row in training["scores"][dtype] if row["length"] == 4096}
        assert all(long[task] >= 0.95 for task in training["tasks"])

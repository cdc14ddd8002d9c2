"""The needle task and the committed model: what demos, benchmarks and accuracy tests rest on."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from specache_fx.examples.needle import MODEL_DIR, build_tokenizer, exact_match, make_prompts, to_text
from specache_fx.examples.needle.task import (
    ANSWER_LEN,
    BOS_ID,
    FIRST_KEY,
    FIRST_VALUE,
    IGNORE,
    PAD_ID,
    RECORD_LEN,
    SEP_ID,
    VOCAB_SIZE,
    copying_batch,
    retrieval_batch,
    words,
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, local_files_only=True, dtype=torch.float32)


@given(seed=st.integers(0, 2**31 - 1), num_records=st.integers(1, 16), context_len=st.integers(97, 300))
@settings(max_examples=25, deadline=None)
def test_prompts_hold_the_asked_record_once(seed, num_records, context_len):
    prompts = make_prompts(3, context_len, num_records, seed)
    assert prompts.input_ids.shape == (3, context_len + 2)
    for ids, answer in zip(prompts.input_ids.tolist(), prompts.answers.tolist(), strict=True):
        assert ids[0] == BOS_ID
        assert ids.count(SEP_ID) == num_records + 1
        assert FIRST_KEY <= ids[-1] < FIRST_VALUE
        place = ids.index(ids[-1])
        assert ids[:context_len].count(ids[-1]) == 1
        assert ids[place - 1 : place - 1 + RECORD_LEN] == [SEP_ID, ids[-1], *answer]
        assert all(FIRST_VALUE <= token < VOCAB_SIZE for token in answer)


def test_prompts_reproducible_and_different_between_seeds():
    first, again, other = (make_prompts(4, 128, 8, seed) for seed in (7, 7, 8))
    assert torch.equal(first.input_ids, again.input_ids)
    assert torch.equal(first.answers, again.answers)
    assert not torch.equal(first.input_ids, other.input_ids)


def test_prompts_unseen_in_training_with_the_same_seed():
    prompts = make_prompts(4, 128, 8, seed=0)
    ids, _ = retrieval_batch(4, 128, 8, 1, torch.Generator().manual_seed(0))
    assert not torch.equal(prompts.input_ids[:, :128], ids[:, :128])


@pytest.mark.parametrize(
    ("context_len", "num_records", "seed", "message"),
    [
        (64, 11, 0, "between 1 and 10"),
        (2000, 57, 0, "between 1 and 56"),
        (64, 0, 0, "num_records"),
        (64, 4, -1, "seed"),
    ],
)
def test_prompts_refused_when_impossible(context_len, num_records, seed, message):
    with pytest.raises(ValueError, match=message):
        make_prompts(1, context_len, num_records, seed)


def test_retrieval_labels_are_the_answers():
    ids, labels = retrieval_batch(2, 64, 5, 3, torch.Generator().manual_seed(1))
    labelled = labels != IGNORE
    assert labelled.sum(dim=1).tolist() == [3 * ANSWER_LEN] * 2
    assert torch.equal(ids[labelled], labels[labelled])


def test_copying_labels_have_an_earlier_occurrence():
    ids, labels = copying_batch(8, 64, torch.Generator().manual_seed(1))
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        first = next(i for i, token in enumerate(label) if token != IGNORE)
        opening = row[first - 2 : first + 1]
        assert any(row[i : i + 3] == opening for i in range(first - 2))


@pytest.mark.parametrize("source", ["built", "committed"])
def test_tokenizer_round_trip(source, request):
    tokenizer = build_tokenizer() if source == "built" else request.getfixturevalue("tokenizer")
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE)) == words()
    prompts = make_prompts(4, 128, 8, seed=3)
    assert torch.equal(tokenizer(prompts.texts, return_tensors="pt").input_ids, prompts.input_ids)
    assert tokenizer.batch_decode(prompts.input_ids, skip_special_tokens=True) == prompts.texts
    assert tokenizer.batch_decode(prompts.answers) == prompts.answer_texts


def test_tokenizer_pads_on_the_left(tokenizer):
    texts = [to_text(make_prompts(1, length, 4, seed=0).input_ids[0]) for length in (64, 80)]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    assert encoded.input_ids[0, :17].tolist() == [PAD_ID] * 16 + [BOS_ID]
    assert encoded.attention_mask[0].tolist() == [0] * 16 + [1] * 66


def test_model_answers_unseen_prompts(model):
    assert exact_match(model, make_prompts(16, 512, 32, seed=100)) >= 0.9


def test_model_folder_is_small_and_records_its_training():
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 3_000_000
    training = json.loads((MODEL_DIR / "training.json").read_text(encoding="utf-8"))
    long = [row for row in training["scores"]["float32"] if row["context_len"] >= 2000]
    assert long
    assert all(row["prompts"] >= 256 and row["exact_match"] >= 0.95 for row in long)

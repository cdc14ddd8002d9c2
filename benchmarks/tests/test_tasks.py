"""Synthetic prompts: their length, the things hidden in them and where."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specache_bench.lab import Lab
from specache_bench.tasks import make_samples
from specache_bench.tasks.building import Writer, fit, hide
from specache_bench.tasks.english import ENGLISH
from specache_fx.errors import ConfigError

NEEDLES = ("single", "multikey", "multivalue", "multiquery", "tracking", "copying", "table", "turns")


@pytest.mark.parametrize("task", ENGLISH)
def test_prompt_is_as_long_as_can_be_and_holds_its_answers(task: str, english: Lab) -> None:
    (sample,) = make_samples(task, english, num_prompts=1, length=2500, seed=3)
    taken = len(english.encode(sample.prompt)) + sample.max_new_tokens
    taken += sum(len(english.encode(turn.question)) + sample.max_new_tokens for turn in sample.turns)
    assert 2500 - 80 < taken <= 2500  # a sentence more has at most 80 letters
    assert len(set(sample.answers)) == len(sample.answers)
    assert all(answer in sample.prompt for answer in sample.answers)
    assert sample.max_new_tokens >= sum(len(answer.split()) for answer in sample.answers)


@pytest.mark.parametrize("task", ENGLISH)
def test_same_seed_gives_the_same_prompts_and_another_gives_others(task: str, english: Lab) -> None:
    def made(seed: int, num_prompts: int) -> list[str]:
        samples = make_samples(task, english, num_prompts=num_prompts, length=1500, seed=seed)
        return [sample.prompt for sample in samples]

    assert made(1, 2) == made(1, 3)[:2]
    assert len({*made(1, 2), *made(2, 2)}) == 4


@given(
    task=st.sampled_from(list(ENGLISH)),
    length=st.integers(400, 900),
    seed=st.integers(0, 99),
    depth=st.none() | st.floats(0, 1),
)
def test_fit_leaves_no_room_for_one_more(task: str, length: int, seed: int, depth: float | None) -> None:
    writer = Writer(str.split)  # type: ignore[arg-type]  # words for tokens

    def write(size: int):
        return ENGLISH[task](random.Random(seed), size, depth)

    draft = fit(task, length, write, writer)
    fitting = next(size for size in range(length) if writer.tokens(write(size + 1)) > length)
    assert draft == write(fitting)


@given(st.integers(0, 30), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_needles_lie_at_their_depths(count: int, depths: list[float]) -> None:
    needles = [f"n{i}" for i in range(len(depths))]
    words = hide([f"s{i}" for i in range(count)], needles, depths).split()
    assert sorted(words) == sorted([*needles, *(f"s{i}" for i in range(count))])
    for needle, depth in zip(needles, depths, strict=True):
        before = sum(word.startswith("s") for word in words[: words.index(needle)])
        assert before == round(depth * count)


@pytest.mark.parametrize("task", NEEDLES)
def test_depth_says_where_the_first_answer_lies(task: str, english: Lab) -> None:
    places = []
    for depth in (0.0, 0.5, 0.9):
        (sample,) = make_samples(task, english, num_prompts=1, length=3000, seed=0, depth=depth)
        places.append(sample.prompt.index(sample.answers[0]) / len(sample.prompt))
    assert places == sorted(places)
    assert places[0] < 0.15
    assert places[2] - places[0] > 0.4


def test_tracking_asks_for_one_chain_and_tells_each_link_after_the_one_before(english: Lab) -> None:
    (sample,) = make_samples("tracking", english, num_prompts=1, length=3000, hops=3, chains=3)
    links = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.prompt)
    assert len(links) == 12
    asked = re.search(r"have the value (\d+)", sample.prompt)
    assert asked is not None
    values: dict[str, str] = {}
    for name, source in links:
        values[name] = values.get(source, source)
    assert all(value.isdecimal() for value in values.values())
    assert {name for name, value in values.items() if value == asked[1]} == set(sample.answers)


def test_table_that_is_asked_is_one_of_several_in_the_text(english: Lab) -> None:
    (sample,) = make_samples("table", english, num_prompts=1, length=3000, rows=5, tables=3)
    found = re.findall(r"Table of the ([\w ]+):\n((?:\d+ \| \w+ \| \w+ \| \w+\n)+)\n", sample.prompt)
    tables = {name: rows.splitlines() for name, rows in found}
    assert [len(rows) for rows in tables.values()] == [5, 5, 5]
    asked = re.search(r"What is in the table of the ([\w ]+)\?", sample.prompt)
    assert asked is not None
    first, *others = tables[asked[1]]
    assert sample.answers == tuple(others)
    assert sample.prompt.endswith(f"Table of the {asked[1]}:\n{first}\n")
    numbers = [row.split(" | ")[0] for rows in tables.values() for row in rows]
    assert len(set(numbers)) == 15


def test_turns_ask_for_other_keys_of_the_same_text(english: Lab) -> None:
    (sample,) = make_samples("turns", english, num_prompts=1, length=3000, records=6, questions=4)
    told = dict(re.findall(r"numbers for (\S+) is: (\d+)\.", sample.prompt))
    asked = [
        re.findall(r"for (\S+) is:$", text)[0]
        for text in (sample.prompt, *(t.question for t in sample.turns))
    ]
    answers = [sample.answers, *(turn.answers for turn in sample.turns)]
    assert len(told) == 6
    assert len(set(asked)) == 4
    assert answers == [(told[key],) for key in asked]


def test_chat_template_wraps_the_question_and_is_tokenised_once(english: Lab) -> None:
    (sample,) = make_samples("single", english, num_prompts=1, length=1200, chat=True)
    assert sample.prompt.startswith("<bos>[user] Some special magic numbers")
    assert re.search(r"\[assistant\] Answer: .* is:$", sample.prompt)
    ids = english.encode(sample.prompt)
    assert ids.count(english.tokenizer.bos_token_id) == 1
    assert len(ids) + sample.max_new_tokens <= 1200
    assert sample.prompt == sample.context + sample.question
    assert sample.question.startswith("\n\nQuestion: ") and "[assistant]" in sample.question


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "nothing"}, "no task 'nothing'. Tasks: single, multikey"),
        ({"length": 200}, "length=200 is too short for task 'single'"),
        ({"length": 0}, "length=0: give a whole number >= 1"),
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"seed": -1}, "seed=-1"),
        ({"depth": 1.5}, "depth=1.5: give a number from 0"),
        ({"records": 3}, "Task 'single' has no option 'records'. It has no options."),
        ({"task": "multikey", "records": "x"}, "Task 'multikey': records=x: give a whole number >= 0."),
        ({"task": "multikey", "records": 0}, "can't be made with {'records': 0}"),
        ({"task": "turns", "questions": 9}, "can't be made with {'questions': 9}"),
        ({"task": "turns", "chat": True}, "is asked in plain text: leave chat out"),
    ],
)
def test_bad_requests_are_refused_with_a_remedy(change: dict, message: str, english: Lab) -> None:
    request = {"task": "single", "num_prompts": 1, "length": 1000} | change
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_samples(request.pop("task"), english, **request)

"""Scores as the benchmarks' own scripts give them.

The figures of `rouge` and `code` were computed with the packages that LongBench calls: rouge 1.0.1, fuzzywuzzy 0.18.0.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specache_fx.errors import ConfigError
from specache_fx.eval.metrics import METRICS, longest_common_subsequence
from specache_fx.eval.sample import Sample
from specache_fx.eval.scoring import SCORING, score
from specache_fx.eval.tasks import TASKS

WORDS = st.lists(st.sampled_from("abcde"), max_size=8)


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "expected"),
    [
        ("string_match_all", "The numbers are 12 and 34.", ("12", "34", "56", "78"), 0.5),
        ("string_match_all", "paris", ("Paris",), 1),
        ("string_match_part", "It was Paris, I think.", ("London", "PARIS"), 1),
        ("string_match_part", "Rome", ("London", "Paris"), 0),
        ("whole_words", "v1 v23 v4", ("v1 v23", "v2"), 0.5),
        ("words_in_place", "a b d c", ("a b", "c d"), 0.5),
        ("copying", "well: a b x c", ("a b c d",), 0.75),
        ("fields", "1 | a | b\n2 | x | d\n", ("1 | a | b", "2 | c | d"), 5 / 6),
        ("fields", "2 | c | d\n2 | x | y\n\nthe end", ("1 | a | b", "2 | c | d"), 0.5),
        ("fields", "a table", ("1 | a",), 0),
        ("qa_f1", "The Eiffel tower!", ("eiffel tower",), 1),
        ("qa_f1", "in Paris", ("nowhere", "Paris, France"), 0.5),
        ("qa_f1", "", ("Paris",), 0),
        ("rouge", "the cat sat on the mat. the dog ran.", ("a cat sat on a mat. a dog ran away.",), 0.8),
        ("rouge", "police killed the gunman", ("police kill the gunman",), 0.75),
        ("rouge", "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", ("w1 w2 w3 w4 w5",), 0.615385),
        ("rouge", "one two three four. five six", ("nothing", "six five. four three two one"), 0.333333),
        ("rouge", "d . . e a a", ("g a",), 0.333333),
        ("rouge", "", ("word",), 0),
        ("retrieval", "Paragraph 12, or 3", ("Paragraph 12",), 0.5),
        ("retrieval", "none", ("Paragraph 12",), 0),
        ("count", "17", ("17",), 1),
        ("count", "17 or 18 of 20", ("18",), 1 / 3),
        ("code", "\n```python\nreturn x + 1\nreturn 2", ("return x+1",), 0.91),
        ("code", "    for i in range(10):", ("for j in range(n):",), 0.78),
        ("code", "# nothing else", ("x",), 0),
    ],
)
def test_metric_gives_the_score_of_the_benchmark(metric, prediction, answers, expected):
    assert METRICS[metric](prediction, answers, ()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("Definition of something", "Definition of something", 1),
        ("Definition of something or Person", "Definition of something", 1 / 2),
        ("Person", "Definition of something", 0),
    ],
)
def test_classification_shares_the_point_among_the_labels_named(prediction, answer, expected):
    classes = ("Definition of something", "Definition", "Person")
    assert METRICS["classification"](prediction, (answer,), classes) == expected


def test_classification_keeps_the_quirk_of_the_benchmarks_loop():
    # Both parts of the right label are named; taking the first one out of the list skips the second.
    classes = ("City", "name", "City name")
    assert METRICS["classification"]("City name", ("City name",), classes) == 1 / 2


@given(first=WORDS, second=WORDS)
def test_longest_common_subsequence_is_one_of_both_and_none_is_longer(first, second):
    def is_within(short, long):
        rest = iter(long)
        return all(word in rest for word in short)

    found = longest_common_subsequence(first, second)
    assert is_within(found, first)
    assert is_within(found, second)
    subsets = ([w for i, w in enumerate(first) if n >> i & 1] for n in range(2 ** len(first)))
    assert len(found) == max(len(subset) for subset in subsets if is_within(subset, second))


def test_every_task_has_a_scoring_and_every_scoring_a_metric():
    assert set(SCORING) == set(TASKS)
    assert {scoring.metric for scoring in SCORING.values()} <= set(METRICS)


def test_what_follows_the_first_line_does_not_count_where_the_benchmark_cuts_it():
    sample = Sample("", ("Paris",), 32, "longbench/triviaqa", 100)
    assert score(sample, "\nParis\nPassage: another one") == 1
    assert score(Sample("", ("Paris",), 32, "longbench/qasper", 100), "Paris\nPassage: another one") < 1


def test_score_of_an_unknown_task_lists_the_tasks():
    with pytest.raises(ConfigError, match=r"no task 'nothing'\. Tasks: single, multikey"):
        score(Sample("", ("x",), 1, "nothing", 1), "x")

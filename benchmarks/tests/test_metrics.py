"""Scores: ours by hand, LongBench's as its own packages give them (rouge 1.0.1, fuzzywuzzy 0.18.0), through lm-eval."""

from __future__ import annotations

import pytest

from specache_bench.metrics import METRICS, score


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
    ],
)
def test_metric_by_hand(metric, prediction, answers, expected):
    assert METRICS[metric](prediction, answers) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("task", "prediction", "answers", "expected"),
    [
        ("qasper", "The Eiffel tower!", ("eiffel tower",), 1),
        ("qasper", "in Paris", ("nowhere", "Paris, France"), 0.5),
        ("qasper", "", ("Paris",), 0),
        ("gov_report", "the cat sat on the mat. the dog ran.", ("a cat sat on a mat. a dog ran away.",), 0.8),
        ("gov_report", "police killed the gunman", ("police kill the gunman",), 0.75),
        ("gov_report", "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", ("w1 w2 w3 w4 w5",), 0.615385),
        ("gov_report", "one two three four. five six", ("nothing", "six five. four three two one"), 0.333333),
        ("gov_report", "d . . e a a", ("g a",), 0.333333),
        ("gov_report", "", ("word",), 0),
        ("passage_retrieval_en", "Paragraph 12, or 3", ("Paragraph 12",), 0.5),
        ("passage_retrieval_en", "none", ("Paragraph 12",), 0),
        ("passage_count", "17", ("17",), 1),
        ("passage_count", "17 or 18 of 20", ("18",), 1 / 3),
        ("lcc", "\n```python\nreturn x + 1\nreturn 2", ("return x+1",), 0.91),
        ("lcc", "    for i in range(10):", ("for j in range(n):",), 0.78),
        ("lcc", "# nothing else", ("x",), 0),
        ("triviaqa", "\nParis\nPassage: another one", ("Paris",), 1),
        ("niah_single_1", "it is 12", ("12", "34"), 0.5),
        ("qa_1", "it is 12", ("12", "34"), 1),
        ("passage_count_e", "17 or 18", ("18",), 0.5),
        ("multifieldqa_zh", "北京大学", ("北京大学",), 1),
        ("dureader", "我爱北京", ("我爱北京",), 1),
        ("passage_retrieval_zh", "段落3或7", ("段落3",), 0.5),
        ("another_set", "it is 12", ("12", "34"), 0.5),
    ],
)
def test_record_is_scored_by_its_benchmark(task, prediction, answers, expected):
    if not task.startswith(("niah", "qa_")):
        pytest.importorskip("lm_eval")
        pytest.importorskip("rouge")
    assert score(f"row:{task}", prediction, answers) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("Definition of something", 1), ("Definition of something or Person", 1 / 2), ("Person", 0)],
)
def test_classification_shares_the_point_among_the_labels_named(prediction, expected):
    pytest.importorskip("lm_eval")
    classes = ("Definition of something", "Definition", "Person")
    for answer in (prediction, f"\n{prediction}\nPerson"):  # its first line counts
        assert score("row:trec", answer, ("Definition of something",), classes) == expected

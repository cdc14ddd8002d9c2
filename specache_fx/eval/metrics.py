"""How an answer is scored, 0 to 1, as the benchmarks' own evaluation scripts do it.

RULER: `string_match_all`, `string_match_part`. LongBench: the `qa_f1`, `rouge`, `classification`, `retrieval`,
`count` and `code` scores. The others are ours.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def string_match_all(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the answers that occur in the prediction, case aside (RULER's for all tasks but QA)."""
    said = prediction.lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 if any of the answers occurs in the prediction, case aside (RULER's for QA)."""
    said = prediction.lower()
    return float(any(answer.lower() in said for answer in answers))


def whole_words(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the answers that the prediction has as whole words, in the words of our own models."""
    said = f" {' '.join(prediction.split())} "
    return sum(f" {answer} " in said for answer in answers) / len(answers)


def words_in_place(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the answer's words that the prediction has at their places, in the words of our own models."""
    words, said = " ".join(answers).split(), prediction.split()
    return sum(a == b for a, b in zip(words, said, strict=False)) / len(words)


def copying(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the answer's words that the prediction has, in that order (longest common subsequence)."""
    words = " ".join(answers).split()
    return len(longest_common_subsequence(words, prediction.split())) / len(words)


def fields(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the table's fields that the prediction has in its row; rows are found by their first field."""
    said = [[field.strip() for field in line.split("|")] for line in prediction.splitlines()]
    rows = {row[0]: row for row in reversed(said)}  # of rows that say the same first, the first counts
    right = [[field.strip() for field in answer.split("|")] for answer in answers]
    hits = sum(a == b for row in right for a, b in zip(row, rows.get(row[0], []), strict=False))
    return hits / sum(map(len, right))


def qa_f1(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """F1 of the words, without case, punctuation and articles; the best of the references."""
    return max(_f1(_normalized(prediction).split(), _normalized(answer).split()) for answer in answers)


def rouge(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """ROUGE-L F1; the best of the references.

    As the package `rouge` that LongBench calls: sentences end at full stops, words at spaces, and each word counts
    once: the words in the longest common subsequences of all pairs of sentences, over those of each text.
    """
    return max(_rouge_l(prediction, answer) for answer in answers)


def classification(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """One over the classes named, if the right one is among them; a class within the right one's name doesn't count."""
    best = 0.0
    for answer in answers:
        named = [label for label in classes if label in prediction]
        # LongBench's script takes labels out of the list that it walks, so the one after each is not looked at. Kept:
        # scores are to be compared with published ones.
        for label in named:
            if label in answer and label != answer:
                named.remove(label)
        best = max(best, 1 / len(named) if answer in named else 0.0)
    return best


def retrieval(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the numbers said that are the right paragraph's."""
    return max(_share(prediction, re.findall(r"Paragraph (\d+)", answer)[0]) for answer in answers)


def count(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the numbers said that are right."""
    return max(_share(prediction, answer) for answer in answers)


def code(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Similarity of the first line that is no comment or fence.

    `fuzzywuzzy.fuzz.ratio` without its optional C extension: difflib's ratio, rounded to a hundredth.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100 for answer in answers)


METRICS: dict[str, Metric] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "whole_words": whole_words,
    "words_in_place": words_in_place,
    "copying": copying,
    "fields": fields,
    "qa_f1": qa_f1,
    "rouge": rouge,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "code": code,
}


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """One of the longest; where there are several, the one that leaves words of `second` out first, from the end."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first, start=1):
        for j, other in enumerate(second, start=1):
            same = lengths[i - 1][j - 1] + 1
            lengths[i][j] = same if word == other else max(lengths[i - 1][j], lengths[i][j - 1])
    i, j = len(first), len(second)
    found: list[str] = []
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.append(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _normalized(text: str) -> str:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(said: Sequence[str], right: Sequence[str]) -> float:
    same = sum((Counter(said) & Counter(right)).values())
    return _harmonic(same, len(said), len(right))


def _harmonic(same: int, said: int, right: int) -> float:
    """F1 of `same / said` and `same / right`."""
    return 2 * same / (said + right) if same else 0.0


def _share(prediction: str, right: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return sum(number == right for number in numbers) / len(numbers) if numbers else 0.0


def _rouge_l(prediction: str, answer: str) -> float:
    said, right = _sentences(prediction), _sentences(answer)
    same = {word for r in right for s in said for word in longest_common_subsequence(r, s)}
    return _harmonic(
        len(same), len({word for s in said for word in s}), len({word for r in right for word in r})
    )


def _sentences(text: str) -> list[list[str]]:
    """Words of sentences. To the package a blank sentence has one word, the empty one; kept, to have its scores."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]

"""English prompts of a given length: built sentences, what is hidden among them, and the search for how many."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specache_bench.tasks.words import ADJECTIVES, NOUNS, TIMES, VERBS
from specache_fx.errors import ConfigError


@dataclass(frozen=True)
class Turn:
    """A further question, with all that goes before the answer, and its answers."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        prompt: Text; the tokenizer adds its special tokens, unless the text begins with them (a chat template).
        answers: Texts that must be found.
        max_new_tokens: Tokens to generate at most.
        metric: In `METRICS`; "row:TASK" of a data set.
        turns: Asked one after another behind the answer to the prompt; each answer has `max_new_tokens`.
        context: Its first part, where the prompt falls into a context and a question.
        question: The rest, with the answer's opening.
        classes: Labels to choose from, for a task of classification.
    """

    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    metric: str
    turns: tuple[Turn, ...] = ()
    context: str = ""
    question: str = ""
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draft:
    """A prompt in its parts: `before` says what is coming, `opening` is the answer's, put into the model's mouth.

    The other fields are those of `Sample`.
    """

    before: str
    body: str
    question: str
    opening: str
    answers: tuple[str, ...]
    max_new_tokens: int
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Writer:
    """Turns a prompt into tokens, special ones included, and a message into a chat; None for plain text."""

    encode: Callable[[str], list[int]]
    chat: Callable[[str], str] | None = None

    def parts(self, context: str, question: str, opening: str) -> tuple[str, str]:
        """A prompt up to the end of its context, and the rest."""
        asked = f"{context}\x00{question}"  # no tokenizer sees the mark
        context, _, question = (asked if self.chat is None else self.chat(asked)).rpartition("\x00")
        return context, question + opening

    def sample(self, draft: Draft, metric: str) -> Sample:
        """The whole text, and where its context ends."""
        space = " " if self.chat is None else ""
        asked = f"\n\n{draft.question}{space}"
        context, question = self.parts(f"{draft.before}\n\n{draft.body}", asked, draft.opening)
        found = (draft.answers, draft.max_new_tokens, metric, draft.turns)
        return Sample(context + question, *found, context, question)

    def tokens(self, draft: Draft) -> int:
        """Of the prompt, all turns and all answers."""
        texts = [self.sample(draft, "").prompt, *(turn.question for turn in draft.turns)]
        return sum(len(self.encode(text)) + draft.max_new_tokens for text in texts)


def fit(task: str, length: int, write: Callable[[int], Draft], writer: Writer) -> Draft:
    """The longest draft that takes at most `length` tokens with its answer.

    Args:
        task: Named in the error.
        length: Tokens.
        write: A draft with so many sentences or words around what is hidden; more of them, more tokens.
        writer: Of the model.

    Raises:
        ConfigError: If not even the shortest one fits.
    """
    if (least := writer.tokens(write(0))) > length:
        raise ConfigError(
            f"length={length:,} is too short for task {task!r}: with nothing around what is hidden, prompt and answer"
            f" take {least:,} tokens."
        )
    low, high = 0, 1
    while writer.tokens(write(high)) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if writer.tokens(write(middle)) <= length else (low, middle)
    return write(low)


def haystack(size: int, rng: random.Random) -> list[str]:
    """So many sentences that say nothing of numbers."""
    return [
        f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)}"
        f" {rng.choice(NOUNS)} {rng.choice(TIMES)}."
        for _ in range(size)
    ]


def hide(sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """Sentences with needles among them, each at its depth from 0 (first) to 1 (last)."""
    places = sorted(zip(depths, range(len(needles)), strict=True), reverse=True)
    text = list(sentences)
    for depth, which in places:
        text.insert(round(depth * len(sentences)), needles[which])
    return " ".join(text)


def depths(count: int, first: float | None, rng: random.Random) -> list[float]:
    """Random depths for needles; the first one's may be given."""
    drawn = [rng.random() for _ in range(count)]
    return drawn if first is None else [first, *drawn[1:]]


def listed(words: Sequence[Any]) -> str:
    """Words as a sentence lists them: a; a and b; a, b and c."""
    head, last = [str(word) for word in words[:-1]], str(words[-1])
    return f"{', '.join(head)} and {last}" if head else last

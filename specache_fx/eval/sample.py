"""`Sample`: one prompt and what should follow it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A further question, asked on the cache that the turns before it left.

    Attributes:
        question: Text with all that goes before the answer.
        answers: What must be found.
    """

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One prompt and what should follow.

    Attributes:
        prompt: Text; tokenised by the model's own tokenizer, which adds its special tokens unless the text already
            begins with them (a chat template).
        answers: What must be found; scored by the task's metric.
        max_new_tokens: Tokens to generate at most.
        task: Name in the table of tasks, such as "multikey", "ruler/vt" or "longbench/qasper".
        length: Tokens asked for.
        depth: 0 (beginning) to 1 (end): where the needle lies; None where there is no such thing.
        metric: In `METRICS`; the task's own by default.
        classes: Labels to choose from, for a task of classification.
        turns: Asked one after another behind the answer to the prompt; each answer has `max_new_tokens`.
    """

    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    task: str
    length: int
    depth: float | None = None
    metric: str | None = None
    classes: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()

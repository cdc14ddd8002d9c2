"""What is run: ways of keeping the cache, each on windows of one text, forced, greedy and sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from specache_fx.eval.bench import Method

Mode = Literal["forced", "greedy", "sampled", "misses", "table", "turns"]
TEXT, SEED, WINDOWS, DECODED, NEW_TOKENS, TEMPERATURE = "austen", 0, 4, 256, 128, 1.0
LENGTHS = {"smollm2": (1024, 2048, 4096), "gemma3": (1024, 2048, 4096, 16384)}
MAIN_LENGTH = 2048
# Tasks where needles don't tell (`specache_fx.eval.tasks`), as hard as both models manage with the full cache.
TASKS: tuple[Mode, ...] = ("table", "turns")
TASK_LENGTH, PROMPTS = 1500, 12

# What follows a miss, with the default's codes; "none" selects in the same step, the bound of any guess.
GUESSES: dict[str, dict[str, Any]] = {
    "recover (default)": {},
    "keep": {"on_miss": "keep"},
    "query": {"lookahead": "query"},
    "refetch": {"on_miss": "refetch"},
    "none": {"lookahead": "none"},
}
PAPER = {"quantizer": "kivi", "on_miss": "keep"}
CODES = ("kivi", "rotated", "nuq", "zipcache")
MIXED = ("turboquant-k2v1", "turboquant-k1v2")


@dataclass(frozen=True)
class Run:
    """One method in one mode at one length.

    Attributes:
        label: As tables call it.
        options: Of the method.
        mode: "forced" feeds the text's own tokens, "greedy" and "sampled" go on by themselves; "misses" feeds them
            too, a window at a time, and follows each guess. "table" and "turns" are tasks.
        length: Tokens of a window, those that are decoded among them.
        name: Of the method.
    """

    label: str
    options: tuple[tuple[str, Any], ...]
    mode: Mode
    length: int
    name: str = "specache"

    @property
    def method(self) -> Method:
        """As the bench runs it."""
        return Method(self.name, self.options)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal runs, also from JSON."""
        return (self.name, *sorted(dict(self.options).items()), self.mode, self.length)


def runs_of(model: str) -> Iterator[Run]:
    """All runs of a model, those that tables need most first; runs of one method follow each other."""
    others: list[tuple[Mode, int]] = [("forced", n) for n in LENGTHS[model] if n != MAIN_LENGTH]
    free: list[tuple[Mode, int]] = [("greedy", MAIN_LENGTH), ("sampled", MAIN_LENGTH)]
    built = {**GUESSES, "paper": PAPER}
    alone = {"bits": 2, "residual_length": 128}  # as much memory as with 64 and 64 prefetched
    for length in (MAIN_LENGTH, *(n for _, n in others)):
        yield Run("full cache", (), "forced", length, "full")
        for bits in (2, 1):
            yield Run("KIVI", tuple({**alone, "bits": bits}.items()), "forced", length, "kivi")
    for bits in (2, 1):
        for label, options in built.items():
            yield from _runs(label, bits, options, [("forced", MAIN_LENGTH)])
    for bits in (2, 1):
        yield from _runs("recover (default)", bits, {}, others)
    for label in ("recover (default)", "keep", "query"):
        yield from _runs(label, 2, GUESSES[label], free)
    yield from _runs("recover (default)", 2, {}, [("misses", MAIN_LENGTH)])
    for bits in (2, 1):
        for name in CODES:
            yield from _runs(name, bits, {"quantizer": name}, [("forced", MAIN_LENGTH)])
    for name in MIXED:
        yield from _runs(name, 2, {"quantizer": name}, [("forced", MAIN_LENGTH)])
    tasks: list[tuple[Mode, int]] = [(task, TASK_LENGTH) for task in TASKS]
    for task, length in tasks:
        yield Run("full cache", (), task, length, "full")
        for bits in (2, 1):
            yield Run("KIVI", tuple({**alone, "bits": bits}.items()), task, length, "kivi")
    for bits in (2, 1):
        for label in ("recover (default)", "paper", "keep", "query"):
            yield from _runs(label, bits, built[label], tasks)
        for name in CODES:
            yield from _runs(name, bits, {"quantizer": name}, tasks)
    for bits in (2, 1):
        for label in ("keep", "query", "paper"):
            yield from _runs(label, bits, built[label], others)
    for label in ("recover (default)", "keep", "query"):
        yield from _runs(label, 1, GUESSES[label], free)


def _runs(label: str, bits: int, options: dict[str, Any], where: list[tuple[Mode, int]]) -> Iterator[Run]:
    for mode, length in where:
        yield Run(label, tuple({"bits": bits, **options}.items()), mode, length)

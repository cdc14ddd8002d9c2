"""Workloads on a model: prompts with answers, and a text's own tokens. `specache_bench.speed` has those of speed.

A workload is a frozen dataclass: equal fields are equal work. `run` gives a record's result. All of them have
`device_bytes`, `full_bytes` and `host_bytes` of one sequence at the end (means over sequences), `ratio`, `decode_ms`
(median of a step of a batch), `seconds` of the whole run, and `stats` of the method itself.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import torch

from specache_bench.fetch import TEXTS, text_file
from specache_bench.lab import Lab
from specache_bench.methods import Asked, Generated
from specache_bench.metrics import score
from specache_bench.records import Method, check_options, read_spelling
from specache_bench.tasks import Sample, make_samples
from specache_fx.errors import ConfigError

Progress = Callable[[int], object]
_BY_TOKEN = ("losses", "kl", "same_top")


@dataclass(frozen=True)
class Prompts:
    """Prompts of a task, answered greedily: `scores` 0 to 1 of each, `score`, `predictions`, and `turn_scores`.

    Attributes:
        task: A name in the model's table of tasks.
        length: Tokens of each.
        number: How many.
        seed: Of their randomness.
        depth: 0..1, where the needle lies; None for anywhere.
        knobs: More of the task's own options.
        chat: Use the chat template.
        agnostic: The method reads (and evicts from) the context without its question, which follows.
    """

    task: str
    length: int
    number: int
    seed: int
    depth: float | None = None
    knobs: tuple[tuple[str, Any], ...] = ()
    chat: bool = False
    agnostic: bool = False
    kind: ClassVar[str] = "prompts"

    @classmethod
    def read(cls, text: str, length: int, number: int, seed: int) -> Prompts:
        """From "multikey,depth=0.5,records=16": options that are no attributes are the task's."""
        task, options = read_spelling(text)
        examples = {"depth": 0.5, "chat": True, "agnostic": True}
        own = {name: options.pop(name) for name in examples if name in options}
        check_options(f"Task {task!r}", own, examples)
        return cls(task, length, number, seed, knobs=tuple(sorted(options.items())), **own)

    @property
    def tokens(self) -> int:
        """Tokens that are read."""
        return self.length * self.number

    def samples(self, lab: Lab) -> list[Sample]:
        """The prompts, made once; a `ConfigError` if they can't be made, or are too long."""
        key = replace(self, agnostic=False)
        if key not in lab.samples:
            given = {"num_prompts": self.number, "depth": self.depth, "chat": self.chat, **dict(self.knobs)}
            made = make_samples(self.task, lab, length=self.length, seed=self.seed, **given)
            for sample in made:
                answers = sample.max_new_tokens * (1 + len(sample.turns))
                more = answers + sum(len(lab.encode_more(turn.question)) for turn in sample.turns)
                lab.check_length(f"a prompt of {self.task!r}", len(lab.encode(sample.prompt)), more)
            lab.samples[key] = made
        found: list[Sample] = lab.samples[key]
        return found

    def check(self, lab: Lab) -> None:
        """Say before the work what is wrong."""
        if self.agnostic and not all(sample.question for sample in self.samples(lab)):
            raise ConfigError(f"Task {self.task!r} has no question of its own: leave agnostic out.")

    def run(self, lab: Lab, method: Method, progress: Progress = lambda done: None) -> dict[str, Any]:
        """See the module."""
        return answer(lab, method, self.samples(lab), self.agnostic, progress)

    def __str__(self) -> str:
        apart = ", question after it" if self.agnostic else ""
        return f"{self.task}, {self.length:,} tokens{apart}"


def answer(
    lab: Lab,
    method: Method,
    samples: Sequence[Sample],
    agnostic: bool = False,
    progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """Generate greedily behind prompts; those of equal length run together, those with turns alone."""
    began, running = time.perf_counter(), lab.running(method)
    prompts = [lab.encode(sample.context if agnostic else sample.prompt) for sample in samples]
    kinds = [
        (len(prompt), sample.max_new_tokens, row if sample.turns or agnostic else None)
        for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
    ]
    answers: list[list[str]] = [[] for _ in samples]
    results: list[tuple[int, Generated]] = []
    for rows in batches(kinds, lab.batch_size):
        first = samples[rows[0]]
        questions = [lab.encode_more(turn.question) for turn in first.turns]
        turns = [lab.encode_more(first.question) if agnostic else [], *questions]
        ids = torch.tensor([prompts[row] for row in rows])
        result = running.ask(Asked(ids, first.max_new_tokens, lab.stop_ids, turns))
        # Of several rows, or of the turns of one.
        for place, new in enumerate(result.ids):
            answers[rows[place % len(rows)]].append(lab.decode(new))
        results.append((len(rows), result))
        progress(len(rows))
    scores = [
        [
            score(sample.metric, text, right, sample.classes)
            for text, right in zip(said, [sample.answers, *(t.answers for t in sample.turns)], strict=True)
        ]
        for sample, said in zip(samples, answers, strict=True)
    ]
    means = [fmean(turns) for turns in scores]
    return {
        "scores": means,
        "score": fmean(means),
        "predictions": ["\n".join(said) for said in answers],
        **({"turn_scores": scores} if samples[0].turns else {}),
        **summed_up(results, began),
    }


@dataclass(frozen=True)
class Windows:
    """Windows of a text whose last tokens are fed one by one.

    Results: `perplexity`; `kl` of the full cache's distribution from the method's, in nats, with `kl_p99` and
    `kl_worst` of single tokens; `same_top`, the share of tokens at which both have the same likeliest one; `losses` and
    `kls` by window.

    Attributes:
        text: A file, or a name of `TEXTS`.
        length: Tokens of a window, those that are decoded included.
        number: How many.
        seed: Of the draw.
        decoded: Tokens of each window that count: the last ones.
    """

    text: str
    length: int
    number: int
    seed: int
    decoded: int = 64
    kind: ClassVar[str] = "windows"

    @property
    def tokens(self) -> int:
        """Tokens that are read."""
        return self.length * self.number

    def check(self, lab: Lab) -> None:
        """Raise a `ConfigError` if the text or the windows are too short or too long."""
        self._windows(lab)

    def _windows(self, lab: Lab) -> torch.Tensor:
        longest = self.length - 2
        if not 1 <= self.decoded <= longest:
            raise ConfigError(
                f"decoded={self.decoded}: of windows of {self.length:,} tokens, 1 to {longest:,} can count."
            )
        windows = read_windows(lab, self.text, self.length, self.number, self.seed)
        lab.check_length("a window", windows.shape[1])
        return windows

    def run(self, lab: Lab, method: Method, progress: Progress = lambda done: None) -> dict[str, Any]:
        """See the class."""
        began, windows, running = time.perf_counter(), self._windows(lab), lab.running(method)
        results: list[tuple[int, Generated]] = []
        for batch in windows.split(lab.batch_size):
            split = self.length - self.decoded - 1
            results.append((len(batch), running.ask(Asked(batch[:, :split], forced=batch[:, split:]))))
            progress(len(batch))
        losses, kls, same_top = (_means([getattr(r, name) for _, r in results]) for name in _BY_TOKEN)
        assert losses is not None
        known = [result.kl.flatten() for _, result in results if result.kl is not None]
        single = torch.cat(known).double() if known else None
        return {
            "perplexity": math.exp(fmean(losses)),
            "kl": None if kls is None else fmean(kls),
            "kl_p99": None if single is None else float(single.quantile(0.99)),
            "kl_worst": None if single is None else float(single.max()),
            "same_top": None if same_top is None else fmean(same_top),
            "losses": losses,
            "kls": kls,
            "tokens": self.decoded * len(losses),
            **summed_up(results, began),
        }

    def __str__(self) -> str:
        return f"{Path(self.text).name}, {self.length:,} tokens"


@dataclass(frozen=True)
class Continuations:
    """Windows of a text that a method goes on with by itself.

    Results: `full_loss`, the mean negative log-likelihood of its tokens under the full cache, in nats;
    `until_difference`, the share of them before the first that differs from the full cache's own continuation; both by
    window in `full_losses` and `until_differences`.

    Attributes:
        text: A file, or a name of `TEXTS`.
        length: Tokens of a window.
        number: How many.
        seed: Of the draw of windows, and of tokens.
        new_tokens: Of each continuation.
        sampled: Tokens are drawn at temperature 1, with the same random numbers for each method; else greedy.
    """

    text: str
    length: int
    number: int
    seed: int
    new_tokens: int = 128
    sampled: bool = False
    kind: ClassVar[str] = "continuations"

    @property
    def tokens(self) -> int:
        """Tokens that are read."""
        return self.length * self.number

    def check(self, lab: Lab) -> None:
        """Raise a `ConfigError` if the text or the windows are too short or too long."""
        windows = read_windows(lab, self.text, self.length, self.number, self.seed)
        lab.check_length("a window", windows.shape[1], self.new_tokens)

    def run(self, lab: Lab, method: Method, progress: Progress = lambda done: None) -> dict[str, Any]:
        """See the class."""
        began, running = time.perf_counter(), lab.running(method)
        windows = read_windows(lab, self.text, self.length, self.number, self.seed)
        results: list[tuple[int, Generated]] = []
        losses: list[float] = []
        shared: list[float] = []
        for batch in windows.split(lab.batch_size):
            asked = Asked(batch, self.new_tokens, seed=self.seed if self.sampled else None)
            result = running.ask(asked)
            ids, full = torch.tensor(result.ids), lab.answer(batch, asked.answerer())
            known = lab.log_probs(batch, ids).gather(2, ids[:, 1:, None].to(lab.model.device))
            losses += (-known.double().mean(dim=(1, 2))).tolist()
            shared += (ids == full).long().cumprod(dim=1).double().mean(dim=1).tolist()
            results.append((len(batch), result))
            progress(len(batch))
        return {
            "full_loss": fmean(losses),
            "until_difference": fmean(shared),
            "full_losses": losses,
            "until_differences": shared,
            **summed_up(results, began),
        }

    def __str__(self) -> str:
        how = "sampled" if self.sampled else "greedy"
        return f"{Path(self.text).name}, {self.length:,} tokens, then {self.new_tokens} {how}"


def read_windows(lab: Lab, text: str, length: int, number: int, seed: int) -> torch.Tensor:
    """Stretches of a text that don't overlap, drawn by the seed, each after the tokenizer's first special token.

    Returns:
        int64 `[number, length]`, in the order of the text.

    Raises:
        ConfigError: If the text can't be read or is too short.
    """
    file = text_file(text) if text in TEXTS else Path(text)
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} can't be read as UTF-8 text ({error}). Give a text file, or a name of `specache-bench models`."
        ) from error
    opening = lab.encode("")
    ids, step = lab.encode(content)[len(opening) :], max(length - len(opening), 1)
    if (found := len(ids) // step) < number:
        raise ConfigError(
            f"{file} has {len(ids):,} tokens, {found} windows of {length:,}: ask for a smaller length or for fewer than"
            f" {number} prompts."
        )
    starts = sorted(random.Random(seed).sample(range(found), number))
    return torch.tensor([opening + ids[step * start : step * (start + 1)] for start in starts])


def batches(kinds: Sequence[Any], batch_size: int) -> Iterator[list[int]]:
    """Rows of the same kind together, in order, at most `batch_size` at a time."""
    groups: dict[Any, list[int]] = {}
    for row, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(row)
    for rows in groups.values():
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size]


def summed_up(results: Sequence[tuple[int, Generated]], began: float) -> dict[str, Any]:
    """Means over sequences, from batches with their number of rows; see the module."""
    rows = sum(n for n, _ in results)
    steps = [ms for _, result in results for ms in result.step_ms]
    stats: dict[str, float | None] = {}
    for name in dict.fromkeys(name for _, result in results for name in result.footprint.stats):
        known = [(n, value) for n, r in results if (value := r.footprint.stats.get(name)) is not None]
        stats[name] = sum(n * value for n, value in known) / sum(n for n, _ in known) if known else None
    device = round(sum(r.footprint.device_bytes for _, r in results) / rows)
    full = round(sum(r.full_bytes for _, r in results) / rows)
    return {
        "device_bytes": device,
        "full_bytes": full,
        "host_bytes": round(sum(r.footprint.host_bytes for _, r in results) / rows),
        "ratio": device / full,
        "decode_ms": median(steps) if steps else None,
        "seconds": time.perf_counter() - began,
        "stats": stats,
    }


def _means(batches: Sequence[torch.Tensor | None]) -> list[float] | None:
    """Over each window's tokens."""
    known = [batch for batch in batches if batch is not None]
    return torch.cat(known).double().mean(dim=1).tolist() if known else None


WORKLOADS: dict[str, Any] = {made.kind: made for made in (Prompts, Windows, Continuations)}

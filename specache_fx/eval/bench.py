"""`Bench`: one model, and any way of keeping its KV cache, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specache_fx.errors import ConfigError
from specache_fx.eval.decode import Sampling
from specache_fx.eval.loading import stop_ids
from specache_fx.eval.methods import Generated, Loaded, Running, Watch, open_method
from specache_fx.eval.on_text import check_new_tokens, continue_text, decode_text
from specache_fx.eval.outcome import ContinuationOutcome, Outcome, TextOutcome, batches, summed_up
from specache_fx.eval.peers import Peers, find_python
from specache_fx.eval.reading import DEFAULT_LIMIT, Reader
from specache_fx.eval.reference import Reference
from specache_fx.eval.sample import Sample
from specache_fx.eval.scoring import score_turns
from specache_fx.eval.subject import Subject


@dataclass(frozen=True)
class Method:
    """A way of keeping the cache.

    Attributes:
        name: In `specache_fx.eval.methods.METHODS`.
        options: Names and values, in the order given.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, **options: Any) -> Method:
        """`Method.of("specache", bits=1)`."""
        return cls(name, tuple(options.items()))

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options)])


class Bench(Subject):
    """One model with its tokenizer; reads each prompt once and runs any method on it.

    A method stays compiled until another one is run: go through lengths and depths inside, methods outside.

    Args:
        model: A folder, a name on the hub, "needle" or "suite" (the project's own), or "smollm2" or "gemma3"
            (`make models`).
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        dtype: "bfloat16", "float16" or "float32".
        threads: CPU threads; torch's choice by default.
        peers_python: Python of the environment with kvpress (`make peers`); `$SPECACHE_PEERS` by default.
        read_limit: Bytes of prompts' caches that are kept for the next method.

    Raises:
        ConfigError: If the model can't be loaded or the device is not there.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "bfloat16",
        threads: int | None = None,
        peers_python: str | None = None,
        read_limit: int = DEFAULT_LIMIT,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        super().__init__(model, device, dtype)
        reader = Reader(self.model, read_limit)
        reference = Reference(self.model, reader)
        self._loaded = Loaded(self.model, self.folder, reader, reference, dtype, self._peers)
        self._peers_python = peers_python
        self._worker: Peers | None = None
        self._open: tuple[Method, Running] | None = None

    def run(
        self,
        method: Method,
        samples: Sequence[Sample],
        *,
        batch_size: int = 8,
        progress: Callable[[int], None] | None = None,
        watch: Watch | None = None,
    ) -> Outcome:
        """Generate greedily behind every prompt.

        Args:
            method: How to keep the cache.
            samples: Prompts; those of equal length run together, those with turns alone.
            batch_size: At most so many at a time.
            progress: Called after each batch with the number of its samples.
            watch: Called after each decode step of a batch, with the step's number and a function that measures.

        Raises:
            ConfigError: On no samples, an unknown method or option, or a prompt that is longer than the model's
                context.
        """
        began = time.perf_counter()
        prompts = self.fitting(samples)
        running = self._running(method)
        stops = stop_ids(self.model, self.tokenizer)
        answers: list[list[str]] = [[] for _ in samples]
        results: list[tuple[int, Generated]] = []
        kinds = [
            (len(prompt), sample.max_new_tokens, row if sample.turns else None)
            for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
        ]
        for rows in batches(kinds, batch_size):
            ids, first = [prompts[row] for row in rows], samples[rows[0]]
            if first.turns:
                turns = [self.encode_more(turn.question) for turn in first.turns]
                result = running.converse(ids[0], turns, first.max_new_tokens, stops)
                answers[rows[0]] = [self.decode(new) for new in result.ids]
            else:
                result = running.generate(torch.tensor(ids), first.max_new_tokens, stops, watch)
                for row, new in zip(rows, result.ids, strict=True):
                    answers[row] = [self.decode(new)]
            results.append((len(rows), result))
            if progress is not None:
                progress(len(rows))
        scores = [score_turns(sample, said) for sample, said in zip(samples, answers, strict=True)]
        return Outcome(
            predictions=tuple("\n".join(said) for said in answers),
            scores=tuple(sum(turns) / len(turns) for turns in scores),
            turn_scores=tuple(scores) if samples[0].turns else (),
            seconds=time.perf_counter() - began,
            **summed_up(results),
        )

    def check_windows(self, windows: torch.Tensor, decoded: int) -> None:
        """Refuse windows that `perplexity` can't score.

        Raises:
            ConfigError: If they are too short for so many tokens that count, or too long for the model.
        """
        longest = windows.shape[1] - 2
        if not 1 <= decoded <= longest:
            raise ConfigError(
                f"decoded={decoded}: of windows of {longest + 2:,} tokens, 1 to {longest:,} can count."
            )
        self.check_length("a window", windows.shape[1])

    @torch.inference_mode()
    def perplexity(
        self,
        method: Method,
        windows: torch.Tensor,
        *,
        decoded: int = 64,
        batch_size: int = 8,
        progress: Callable[[int], None] | None = None,
    ) -> TextOutcome:
        """Feed a text token by token: how likely its last tokens are to the model with that cache, and to the full one.

        Args:
            method: How to keep the cache.
            windows: Token ids from `read_windows`, int64 `[num_windows, length]`.
            decoded: Tokens of each window that count: the last ones. The ones before are read as a prompt.
            batch_size: Windows at a time.
            progress: Called after each batch with the number of its windows.

        Raises:
            ConfigError: On an unknown method or option, or windows that are too short or too long.
        """
        self.check_windows(windows, decoded)
        return decode_text(self._running(method), windows, decoded, batch_size, progress)

    @torch.inference_mode()
    def continuation(
        self,
        method: Method,
        windows: torch.Tensor,
        *,
        new_tokens: int = 64,
        sampling: Sampling | None = None,
        batch_size: int = 8,
        progress: Callable[[int], None] | None = None,
    ) -> ContinuationOutcome:
        """Let a method go on behind a text: how far as the full cache does, and how likely to the full cache.

        Args:
            method: How to keep the cache.
            windows: Token ids from `read_windows`, int64 `[num_windows, length]`.
            new_tokens: How many follow each window; stop tokens stop nothing.
            sampling: Temperature and seed, the same random numbers for every method; greedy by default.
            batch_size: Windows at a time.
            progress: Called after each batch with the number of its windows.

        Raises:
            ConfigError: On an unknown method or option, no tokens, or windows that are too long.
        """
        check_new_tokens(new_tokens, sampling)
        self.check_length("a window", windows.shape[1], new_tokens)
        running, reference = self._running(method), self._loaded.reference
        return continue_text(running, reference, windows, new_tokens, sampling, batch_size, progress)

    def _running(self, method: Method) -> Running:
        if self._open is not None and self._open[0] == method:
            return self._open[1]
        self._leave()
        running = open_method(method.name, dict(method.options), self._loaded)
        self._open = (method, running)
        return running

    def _leave(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def close(self) -> None:
        """Leave the model as it was and end the worker, if there is one."""
        self._leave()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _peers(self) -> Peers:
        if self._worker is None:
            python = find_python(self._peers_python)
            self._worker = Peers(python, self.folder, self.dtype, self.model.device.type)
        return self._worker

    @property
    def peers_versions(self) -> dict[str, str] | None:
        """Versions in the peers' environment; None if no press was run."""
        return None if self._worker is None else self._worker.versions

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

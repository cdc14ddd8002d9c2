"""`Bench`: one model, and any way of keeping its KV cache, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specache_fx.errors import ConfigError
from specache_fx.eval.loading import stop_ids
from specache_fx.eval.methods import Generated, Loaded, Running, Watch, open_method
from specache_fx.eval.outcome import Outcome, TextOutcome, batches, summed_up
from specache_fx.eval.peers import Peers, find_python
from specache_fx.eval.reading import DEFAULT_LIMIT, Reader
from specache_fx.eval.sample import Sample
from specache_fx.eval.scoring import score
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
        model: A folder, a name on the hub, or "needle" or "suite" (the project's own).
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
        self._loaded = Loaded(self.model, self.folder, Reader(self.model, read_limit), dtype, self._peers)
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
            samples: Prompts; those of equal length run together.
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
        predictions = [""] * len(samples)
        results: list[tuple[int, Generated]] = []
        for rows in batches(
            [(len(p), s.max_new_tokens) for p, s in zip(prompts, samples, strict=True)], batch_size
        ):
            ids = torch.tensor([prompts[row] for row in rows])
            result = running.generate(ids, samples[rows[0]].max_new_tokens, stops, watch)
            for row, new in zip(rows, result.ids, strict=True):
                predictions[row] = self.decode(new)
            results.append((len(rows), result))
            if progress is not None:
                progress(len(rows))
        scores = tuple(score(sample, said) for sample, said in zip(samples, predictions, strict=True))
        seconds = time.perf_counter() - began
        return Outcome(predictions=tuple(predictions), scores=scores, seconds=seconds, **summed_up(results))

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
        """Feed a text token by token: how likely its last tokens are to the model with that cache.

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
        began = time.perf_counter()
        running = self._running(method)
        losses: list[float] = []
        results: list[tuple[int, Generated]] = []
        for batch in windows.split(batch_size):
            result = running.score(batch[:, : -decoded - 1], batch[:, -decoded - 1 :])
            assert result.losses is not None
            losses += result.losses.double().mean(dim=1).tolist()
            results.append((len(batch), result))
            if progress is not None:
                progress(len(batch))
        seconds = time.perf_counter() - began
        tokens = decoded * len(windows)
        return TextOutcome(losses=tuple(losses), tokens=tokens, seconds=seconds, **summed_up(results))

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

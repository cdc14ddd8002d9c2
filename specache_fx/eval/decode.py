"""The decode loop that every method of this process shares, and what chooses the next token."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel


class Chooser(Protocol):
    """Chooses tokens from logits, float `[batch, vocab]`, one step after another."""

    def next(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The tokens to feed next, int64 `[batch, 1]`; None at the end."""

    def ids(self) -> list[list[int]]:
        """The tokens of each row."""

    def losses(self) -> torch.Tensor | None:
        """Of forced tokens, float32 `[batch, steps]`."""

    def against_full(self) -> AgainstFull | None:
        """Of forced tokens, where the full cache's distributions are given."""


@dataclass(frozen=True)
class AgainstFull:
    """The distributions that predict forced tokens, beside the full cache's on the same tokens.

    Attributes:
        kl: KL divergence of the full cache's distribution from the method's, KL(full || method), in nats; float32
            `[batch, steps]`.
        same_top: Whether the likeliest token is the same; bool `[batch, steps]`.
    """

    kl: torch.Tensor
    same_top: torch.Tensor


class Greedy:
    """The likeliest token, up to `max_new_tokens` or until every row has met a stop token."""

    def __init__(self, max_new_tokens: int, stop_ids: frozenset[int]) -> None:
        self._max_new_tokens, self._stop_ids = max_new_tokens, stop_ids
        self._chosen: list[torch.Tensor] = []

    def next(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See `Chooser`. The last token chosen is not fed: nothing would be read from it."""
        tokens = logits.argmax(dim=-1, keepdim=True)
        self._chosen.append(tokens.cpu())
        if len(self._chosen) == self._max_new_tokens or all(self._stopped()):
            return None
        return tokens

    def _stopped(self) -> list[bool]:
        if not self._stop_ids:
            return [False]
        return [bool(self._stop_ids.intersection(row)) for row in torch.cat(self._chosen, dim=1).tolist()]

    @property
    def last(self) -> int:
        """The newest token of the first row."""
        return int(self._chosen[-1][0])

    def ids(self) -> list[list[int]]:
        """See `Chooser`; without the stop token and what comes after it."""
        return [until(row, self._stop_ids) for row in torch.cat(self._chosen, dim=1).tolist()]

    def losses(self) -> None:
        """None: the tokens are the model's own."""

    def against_full(self) -> None:
        """None: the tokens are the model's own."""


@dataclass(frozen=True)
class Sampling:
    """Tokens drawn at random, with the same random numbers for every method.

    Attributes:
        temperature: Divides the logits; above 0.
        seed: Of the random numbers.
    """

    temperature: float
    seed: int

    def of_batch(self, number: int) -> Sampling:
        """The same with random numbers of their own for a batch."""
        return Sampling(self.temperature, 1_000_003 * (number + 1) + self.seed)


class Sampled(Greedy):
    """Tokens drawn by the Gumbel trick: caches whose distributions are alike so draw the same token nearly always.

    Args:
        max_new_tokens: As for `Greedy`.
        stop_ids: As for `Greedy`.
        sampling: Temperature and seed.
    """

    def __init__(self, max_new_tokens: int, stop_ids: frozenset[int], sampling: Sampling) -> None:
        super().__init__(max_new_tokens, stop_ids)
        self._temperature = sampling.temperature
        self._random = torch.Generator().manual_seed(sampling.seed)

    def next(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See `Chooser`."""
        noise = torch.empty(logits.shape).exponential_(generator=self._random).log_().neg_()
        return super().next(logits.float() / self._temperature + noise.to(logits.device))


def choose(max_new_tokens: int, stop_ids: frozenset[int], sampling: Sampling | None) -> Greedy:
    """What chooses tokens: greedily, or as `sampling` says."""
    if sampling is None:
        return Greedy(max_new_tokens, stop_ids)
    return Sampled(max_new_tokens, stop_ids, sampling)


def until(row: list[int], stop_ids: frozenset[int]) -> list[int]:
    """A row up to and without its first stop token."""
    return row[: next((i for i, token in enumerate(row) if token in stop_ids), len(row))]


class Forced:
    """Given tokens, int64 `[batch, steps + 1]`. The first follows the prompt: its loss is prefill's, not counted.

    Args:
        tokens: The tokens.
        full: The full cache's distributions of all but the first: log-probabilities, float32 `[batch, steps, vocab]`.
    """

    def __init__(self, tokens: torch.Tensor, full: torch.Tensor | None = None) -> None:
        self._tokens, self._full = tokens, full
        self._losses: list[torch.Tensor] = []
        self._kl: list[torch.Tensor] = []
        self._same_top: list[torch.Tensor] = []
        self._step = 0

    def next(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See `Chooser`."""
        expected = self._tokens[:, self._step].to(logits.device)
        if self._step:
            self.predicted(logits, expected, self._step - 1)
        self._step += 1
        return expected[:, None] if self._step < self._tokens.shape[1] else None

    def predicted(self, logits: torch.Tensor, expected: torch.Tensor, step: int) -> None:
        """Measure what a step predicts.

        Args:
            logits: Float `[batch, vocab]`.
            expected: The tokens that follow, int64 `[batch]`.
            step: Of the steps that count, from 0.
        """
        own = torch.log_softmax(logits.float(), dim=-1)
        self._losses.append(-own.gather(1, expected[:, None])[:, 0])
        if self._full is not None:
            full = self._full[:, step]
            terms = torch.nn.functional.kl_div(own, full, reduction="none", log_target=True)
            # A sum of many small terms of both signs, which is never below 0 but for rounding.
            self._kl.append(terms.sum(dim=-1, dtype=torch.float64).clamp(min=0).float())
            self._same_top.append(own.argmax(dim=-1) == full.argmax(dim=-1))

    def ids(self) -> list[list[int]]:
        """The tokens that were given."""
        return self._tokens.tolist()

    def losses(self) -> torch.Tensor:
        """Of all tokens but the first: float32 `[batch, steps]`."""
        return torch.stack(self._losses, dim=1).cpu()

    def against_full(self) -> AgainstFull | None:
        """See `Chooser`."""
        if self._full is None:
            return None
        return AgainstFull(torch.stack(self._kl, dim=1).cpu(), torch.stack(self._same_top, dim=1).cpu())


@dataclass(frozen=True)
class Decoded:
    """The cache at the end and how long each step took, in ms."""

    cache: Any
    step_ms: list[float]


def decode(
    model: PreTrainedModel,
    logits: torch.Tensor,
    cache: Any,
    chooser: Chooser,
    watch: Callable[[int, Any], None] = lambda step, cache: None,
) -> Decoded:
    """Decode until the chooser ends it.

    Args:
        model: Compiled or not.
        logits: Of the prompt's last token, float `[batch, vocab]`.
        cache: Of the prompt.
        chooser: Chooses the tokens.
        watch: Called after each step with its number and the cache.
    """
    step_ms: list[float] = []
    arguments = last_logits_only(model)
    while (tokens := chooser.next(logits)) is not None:
        began = time.perf_counter()
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True, **arguments)
        cache, logits = out.past_key_values, out.logits[:, -1]
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        step_ms.append((time.perf_counter() - began) * 1000)
        watch(len(step_ms) - 1, cache)
    return Decoded(cache, step_ms)


def last_logits_only(model: PreTrainedModel) -> dict[str, Any]:
    """The argument that makes a model compute the logits of the last token alone, where it has one."""
    known = inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in known else {}

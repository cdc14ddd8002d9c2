"""The decode loop of every method, and what chooses the next token.

It imports torch alone: the workers of other environments run it too.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Protocol

import torch


class Chooser(Protocol):
    """Chooses tokens from logits, float `[batch, vocab]`, one step after another."""

    def next(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The tokens to feed next, int64 `[batch, 1]`; None at the end."""


class Decoder:
    """A model at work on a cache.

    Args:
        model: Compiled or not.
        cache: Holds what came before.
        logits: Of the newest token, float `[batch, vocab]`; None before the first step.
        position: Of the next token, where the cache doesn't know it: it is shorter than the text.
        first: The tokens that `greedy` begins with where there are no logits, int64 `[batch, 1]`.

    Attributes:
        num_fed: Tokens that it has fed, of each sequence.
        step_ms: Milliseconds of each step, the device waited for.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        logits: torch.Tensor | None = None,
        position: int | None = None,
        first: torch.Tensor | None = None,
    ) -> None:
        self.model, self.cache, self.logits, self.position, self.first = model, cache, logits, position, first
        self.num_fed = 0
        self.step_ms: list[float] = []
        self._arguments = last_logits_only(model)

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the model on more tokens, int64 `[batch, q_len]`; the logits of the last, `[batch, vocab]`."""
        arguments = self._arguments
        if self.position is not None:
            places = torch.arange(self.position, self.position + tokens.shape[1], device=tokens.device)
            arguments = arguments | {
                "position_ids": places[None].expand(len(tokens), -1),
                "cache_position": places,
            }
            self.position += tokens.shape[1]
        self.num_fed += tokens.shape[1]
        out = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, **arguments)
        self.cache, self.logits = out.past_key_values, out.logits[:, -1]
        return self.logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """`feed` one token a sequence, and note the time."""
        began = time.perf_counter()
        logits = self.feed(tokens)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self.step_ms.append((time.perf_counter() - began) * 1000)
        return logits

    def greedy(self) -> None:
        """A step with the likeliest token; `first` where there are no logits yet."""
        tokens = self.first if self.logits is None else self.logits.argmax(dim=-1, keepdim=True)
        assert tokens is not None
        self.step(tokens)


def decode(
    decoder: Decoder, chooser: Chooser, watch: Callable[[int, Any], None] = lambda step, cache: None
) -> None:
    """Decode until the chooser ends it; `watch` is called after each step with its number and the cache."""
    assert decoder.logits is not None
    logits, number = decoder.logits, 0
    while (tokens := chooser.next(logits)) is not None:
        logits = decoder.step(tokens)
        watch(number, decoder.cache)
        number += 1


def last_logits_only(model: Any) -> dict[str, Any]:
    """The argument that makes a model compute the logits of the last token alone, where it has one."""
    known = inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in known else {}


class Greedy:
    """The likeliest token, up to `max_new_tokens` or until every row has met a stop token."""

    def __init__(self, max_new_tokens: int, stop_ids: frozenset[int] = frozenset()) -> None:
        self._max_new_tokens, self._stop_ids = max_new_tokens, stop_ids
        self._chosen: list[torch.Tensor] = []

    def next(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See `Chooser`. The last token chosen is not fed: nothing would be read from it."""
        tokens = self._choose(logits)
        self._chosen.append(tokens.cpu())
        rows = torch.cat(self._chosen, dim=1).tolist() if self._stop_ids else [[]]
        stopped = all(self._stop_ids.intersection(row) for row in rows)
        return None if len(self._chosen) == self._max_new_tokens or stopped else tokens

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 `[batch, 1]`."""
        return logits.argmax(dim=-1, keepdim=True)

    @property
    def last(self) -> torch.Tensor:
        """The newest tokens, int64 `[batch, 1]`: chosen, and not fed at the end."""
        return self._chosen[-1]

    def ids(self) -> list[list[int]]:
        """The tokens of each row, without its stop token and what comes after it."""
        rows: list[list[int]] = torch.cat(self._chosen, dim=1).tolist()
        return [list(takewhile(lambda token: token not in self._stop_ids, row)) for row in rows]


class Sampled(Greedy):
    """Tokens drawn at temperature 1: the largest sum of logit and Gumbel noise, which is the same for all methods."""

    def __init__(self, max_new_tokens: int, seed: int) -> None:
        super().__init__(max_new_tokens)
        self._generator = torch.Generator().manual_seed(seed)

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        uniform = torch.rand(logits.shape, dtype=torch.float64, generator=self._generator).to(logits.device)
        return (logits.double() - (-uniform.log()).log()).argmax(dim=-1, keepdim=True)


class Forced:
    """Given tokens, int64 `[batch, steps + 1]`. The first follows the prompt: its loss is prefill's, not counted.

    Args:
        tokens: The tokens.
        full: The full cache's log-probabilities of all but the first, float32 `[batch, steps, vocab]`.
        keep: Where to write the distributions that predict the tokens, of the same shape.
    """

    def __init__(
        self, tokens: torch.Tensor, full: torch.Tensor | None = None, keep: torch.Tensor | None = None
    ) -> None:
        self._tokens, self._full, self._keep = tokens, full, keep
        self._losses: list[torch.Tensor] = []
        self._kl: list[torch.Tensor] = []
        self._same_top: list[torch.Tensor] = []
        self._step = 0

    def next(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See `Chooser`."""
        step, self._step = self._step, self._step + 1
        expected = self._tokens[:, step].to(logits.device)[:, None]
        if step:
            own = torch.log_softmax(logits.float(), dim=-1)
            self._losses.append(-own.gather(1, expected)[:, 0])
            if self._keep is not None:
                self._keep[:, step - 1] = own
            if self._full is not None:
                full = self._full[:, step - 1]
                terms = torch.nn.functional.kl_div(own, full, reduction="none", log_target=True)
                # A sum of many small terms of both signs, which is never below 0 but for rounding.
                self._kl.append(terms.sum(dim=-1, dtype=torch.float64).clamp(min=0).float())
                self._same_top.append(own.argmax(dim=-1) == full.argmax(dim=-1))
        return expected if self._step < self._tokens.shape[1] else None

    def ids(self) -> list[list[int]]:
        """The tokens that were given."""
        return self._tokens.tolist()

    def losses(self) -> torch.Tensor:
        """Negative log-likelihood of all tokens but the first: float32 `[batch, steps]`."""
        return torch.stack(self._losses, dim=1).cpu()

    def kl(self) -> torch.Tensor | None:
        """KL(full || method) in nats, float32 `[batch, steps]`."""
        return torch.stack(self._kl, dim=1).cpu() if self._kl else None

    def same_top(self) -> torch.Tensor | None:
        """Whether the likeliest token is the full cache's, bool `[batch, steps]`."""
        return torch.stack(self._same_top, dim=1).cpu() if self._same_top else None

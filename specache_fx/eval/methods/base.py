"""What a method is: a way of keeping the KV cache while a model decodes.

A method that runs in this process is a `CacheMethod`: it turns the 16-bit cache of a prompt into a cache of its own and
counts its bytes. One that runs elsewhere (kvpress, `press.py`) is a `Running` by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedModel

from specache_fx.errors import ConfigError
from specache_fx.eval.decode import (
    AgainstFull,
    Chooser,
    Decoded,
    Forced,
    Greedy,
    Sampling,
    choose,
    decode,
    last_logits_only,
)
from specache_fx.eval.reading import Reader
from specache_fx.eval.reference import Reference


@dataclass(frozen=True)
class Footprint:
    """What the cache of one batch takes at this moment, counted on its tensors, and what it did.

    Attributes:
        device_bytes: On the model's device, for all rows.
        host_bytes: On the host, for all rows.
        stats: Rates and counts by name; what a method doesn't know is left out.
    """

    device_bytes: int
    host_bytes: int = 0
    stats: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Generated:
    """What one batch gave.

    Attributes:
        ids: New tokens of each row, up to and without the first stop token.
        losses: Negative log-likelihood of each forced token that was predicted by a decode step, float32
            `[batch, steps]`; None when generating.
        footprint: At the end.
        full_bytes: What the full cache of the same length takes, for all rows.
        step_ms: Of each decode step that is no warm-up: neither a batch's first nor one that compiles.
        against_full: Of forced tokens; None when generating, and where another process has the logits.
    """

    ids: list[list[int]]
    losses: torch.Tensor | None
    footprint: Footprint
    full_bytes: int
    step_ms: list[float]
    against_full: AgainstFull | None = None


# Called after each decode step with its number from 0 and a function that measures.
Watch = Callable[[int, Callable[[], Footprint]], None]


class Running(Protocol):
    """A method that is ready to run on one model."""

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        watch: Watch | None,
        sampling: Sampling | None = None,
    ) -> Generated:
        """Decode behind prompts of equal length, int64 `[batch, prompt_len]`: greedily, or as `sampling` says."""

    def converse(
        self, prompt: list[int], turns: Sequence[list[int]], max_new_tokens: int, stop_ids: frozenset[int]
    ) -> Generated:
        """Answer a prompt greedily, then each turn on the cache that is there; the ids are one row an answer."""

    def score(self, input_ids: torch.Tensor, forced: torch.Tensor) -> Generated:
        """Feed given tokens, int64 `[batch, steps + 1]`, behind prompts; see `Generated.losses`."""

    def close(self) -> None:
        """Leave the model as it was before."""


@dataclass(frozen=True)
class Loaded:
    """What a method runs on.

    Attributes:
        model: In this process.
        folder: Its folder or name, for those that load it elsewhere.
        reader: Reads prompts with the plain model, each once.
        reference: What the full cache says of a text.
        dtype: "bfloat16", "float16" or "float32".
        peers: Gives a worker of the peers' environment.
    """

    model: PreTrainedModel
    folder: str
    reader: Reader
    reference: Reference
    dtype: str
    peers: Callable[[], Any]


class CacheMethod(ABC):
    """A method of this process.

    Attributes:
        defaults: Options and their values; no others are taken, unless `check` says otherwise.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Check the options.

        Raises:
            ConfigError: On an unknown option or a bad value.
        """
        self.name = name
        self.options = self.check(name, options)

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with defaults filled in."""
        refuse_unknown(name, options, cls.defaults)
        return {**cls.defaults, **options}

    @classmethod
    def open(cls, name: str, options: Mapping[str, Any], loaded: Loaded) -> Running:
        """Make it ready on a model."""
        return InProcess(cls(name, options), loaded)

    def prepare(self, model: PreTrainedModel) -> None:  # noqa: B027 - most change nothing
        """Change the model, such as compile it."""

    def restore(self, model: PreTrainedModel) -> None:  # noqa: B027
        """Undo `prepare`."""

    @abstractmethod
    def begin(self, model: PreTrainedModel, cache: Any) -> Any:
        """Turn a copy of the prompt's `DynamicCache`, which this may use up, into the cache to decode with."""

    def told(self, cache: Any, prompt: torch.Tensor) -> None:  # noqa: B027
        """Learn a prompt's tokens, int64 `[batch, prompt_len]`, after the first step behind it (again: no effect).

        The plain model read the prompt, once for all methods: a method that goes by tokens did not see them.
        """

    @abstractmethod
    def measure(self, cache: Any) -> Footprint:
        """Say what the cache takes now."""


def refuse_unknown(name: str, options: Mapping[str, Any], valid: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` on options that are not among the valid ones."""
    if unknown := [option for option in options if option not in valid]:
        known = f"Valid options: {', '.join(valid)}." if valid else "It has no options."
        raise ConfigError(f"Method {name!r} has no option {', '.join(map(repr, unknown))}. {known}")


class InProcess:
    """A `CacheMethod` on a model of this process."""

    def __init__(self, method: CacheMethod, loaded: Loaded) -> None:
        self._method, self._model, self._loaded = method, loaded.model, loaded
        self._warm: set[int] = set()
        method.prepare(loaded.model)

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        watch: Watch | None,
        sampling: Sampling | None = None,
    ) -> Generated:
        """Decode greedily or draw tokens; see `Running`."""
        return self._run(input_ids, choose(max_new_tokens, stop_ids, sampling), watch)

    @torch.inference_mode()
    def converse(
        self, prompt: list[int], turns: Sequence[list[int]], max_new_tokens: int, stop_ids: frozenset[int]
    ) -> Generated:
        """Answer turn after turn; see `Running`."""
        read = self._loaded.reader.read(torch.tensor([prompt]))
        cache, logits, kv_len = self._method.begin(self._model, read.copy()), read.logits, len(prompt)
        answers: list[list[int]] = []
        step_ms: list[float] = []
        unfed: list[int] = []  # the last token of an answer, which was chosen and no more
        for turn in [None, *turns]:
            if turn is not None:
                tokens = torch.tensor([[*unfed, *turn]], device=self._model.device)
                arguments = last_logits_only(self._model)
                out = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, **arguments)
                cache, logits, kv_len = out.past_key_values, out.logits[:, -1], kv_len + tokens.shape[1]
            chooser = Greedy(max_new_tokens, stop_ids)
            done = decode(self._model, logits, cache, chooser, self._telling(torch.tensor([prompt])))
            cache, kv_len = done.cache, kv_len + len(done.step_ms)
            answers, unfed = answers + chooser.ids(), [chooser.last]
            step_ms += done.step_ms[2:]
        return Generated(answers, None, self._method.measure(cache), read.full_bytes(kv_len), step_ms)

    def score(self, input_ids: torch.Tensor, forced: torch.Tensor) -> Generated:
        """Feed given tokens; see `Running`."""
        return self._run(input_ids, Forced(forced, self._loaded.reference.log_probs(input_ids, forced)), None)

    def close(self) -> None:
        """Undo what `prepare` did."""
        self._method.restore(self._model)

    @torch.inference_mode()
    def _run(self, input_ids: torch.Tensor, chooser: Chooser, watch: Watch | None) -> Generated:
        read = self._loaded.reader.read(input_ids)

        cache = self._method.begin(self._model, read.copy())
        done: Decoded = decode(self._model, read.logits, cache, chooser, self._telling(input_ids, watch))
        # A batch's first step takes the prompt's cache over; the first two of a new batch size compile.
        warm_up = 1 if len(input_ids) in self._warm else 2
        self._warm.add(len(input_ids))
        return Generated(
            chooser.ids(),
            chooser.losses(),
            self._method.measure(done.cache),
            read.full_bytes(input_ids.shape[1] + len(done.step_ms)),
            done.step_ms[warm_up:],
            chooser.against_full(),
        )

    def _telling(self, prompt: torch.Tensor, watch: Watch | None = None) -> Callable[[int, Any], None]:
        """What `decode` calls after each step."""

        def watched(step: int, cache: Any) -> None:
            if step == 0:
                self._method.told(cache, prompt)
            if watch is not None:
                watch(step, lambda: self._method.measure(cache))

        return watched

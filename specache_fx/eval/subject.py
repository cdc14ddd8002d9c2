"""`Subject`: a model with its tokenizer, and what fits into it."""

from __future__ import annotations

from collections.abc import Sequence

from specache_fx.errors import ConfigError
from specache_fx.eval.loading import encode, load
from specache_fx.eval.sample import Sample


class Subject:
    """A model with its tokenizer.

    Args:
        model: A folder, a name on the hub, "needle" or "suite" (the project's own), or "smollm2" or "gemma3"
            (`make models`).
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        dtype: "bfloat16", "float16" or "float32".

    Attributes:
        name: As it was given.
        folder: Where it was loaded from.
        model: On the device, uncompiled.
        tokenizer: Its own.

    Raises:
        ConfigError: If the model can't be loaded or the device is not there.
    """

    def __init__(self, model: str, device: str, dtype: str) -> None:
        self.name, self.dtype = model, dtype
        self.folder, self.model, self.tokenizer = load(model, device, dtype)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, the tokenizer's special tokens included."""
        return encode(self.tokenizer, prompt)

    def encode_more(self, text: str) -> list[int]:
        """The tokens of a text that goes on behind others."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of new tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def max_context(self) -> int | None:
        """Tokens that the model can hold, prompt and answer together; None where its config doesn't say."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def fitting(self, samples: Sequence[Sample]) -> list[list[int]]:
        """The tokens of each prompt.

        Raises:
            ConfigError: If one is too long for the model.
        """
        prompts = [self.encode(sample.prompt) for sample in samples]
        for ids, sample in zip(prompts, samples, strict=True):
            more = sum(len(self.encode_more(turn.question)) + sample.max_new_tokens for turn in sample.turns)
            self.check_length(f"a prompt of {sample.task!r}", len(ids), sample.max_new_tokens + more)
        return prompts

    def check_length(self, what: str, num_tokens: int, max_new_tokens: int = 0) -> None:
        """Raise a `ConfigError` where tokens and those to follow are more than the model holds."""
        longest = self.max_context
        if longest is not None and num_tokens + max_new_tokens > longest:
            follow = f", and {max_new_tokens:,} are to follow" if max_new_tokens else ""
            raise ConfigError(
                f"The model {self.name!r} holds {longest:,} tokens: {what} has {num_tokens:,}{follow}. Ask for a"
                " smaller length."
            )

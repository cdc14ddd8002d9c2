"""`warm_up`: makes all graphs that a server's answers need, before the first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from specache_fx.calls.this_thread import having
from specache_fx.compiled import with_generators
from specache_fx.errors import ConfigError
from specache_fx.report.progress import counted
from specache_fx.saved.loading import options_of

_LENGTHS, _STEPS, _TURN = (8, 13, 21, 1), 6, 3  # tokens; Dynamo has some sizes vary at the third


class Answer(NamedTuple):
    """One call of `generate()`: rows of its cache, tokens of each, a shorter first prompt, beams of one prompt."""

    batch_size: int
    length: int
    padded: bool = False
    beams: bool = False

    def __str__(self) -> str:
        rows = f"{self.batch_size} {'beam' if self.beams else 'prompt'}{'s' * (self.batch_size > 1)}"
        return f"{rows} of {self.length} tokens{', padded' * self.padded}"


def warm_up(model: nn.Module, *, batch_sizes: Sequence[int] = (1,), turns: bool = True) -> None:
    """Make the graphs that `model.generate()` needs, so that no later call waits for a compile.

    It generates a few tokens from random ones. Afterwards prompts of any length, sampling and beams compile nothing,
    as long as the cache has as many rows as one of `batch_sizes`. A beam search has `num_beams` rows a prompt. A model
    with a window is given prompts of its length. Call it in the mode of the answers: graphs of `torch.inference_mode()`
    are others.

    These still compile at their first time: one padded row; a loop of your own without
    `generate()`; what a call is given beyond ids and a mask, such as `output_attentions`. So does a padded prompt where
    prompts are traced.

    Args:
        model: A model with `generate()` that is compiled with this backend.
        batch_sizes: Rows of the caches to come. With more than one row, padded prompts are made too.
        turns: Whether caches will be given to `generate()` again.

    Raises:
        ConfigError: If the model is not compiled with this backend, is no decoder of token ids with `generate()`, or
            has a context that is too short; on batch sizes that are no positive integers.
    """
    is_list = isinstance(batch_sizes, (list, tuple))
    if not is_list or not batch_sizes or any(type(size) is not int or size < 1 for size in batch_sizes):
        raise ConfigError(f"batch_sizes={batch_sizes!r}: give whole numbers >= 1, such as (1, 8).")
    text = _text_config(model)
    answers = list(_answers(text, sorted(set(batch_sizes))))
    if not answers:
        raise ConfigError(
            f"warm_up() needs a context of {min(_LENGTHS) + 2 * _STEPS + _TURN} tokens, and this model has"
            f" {text.max_position_embeddings}. Run a prompt and a few tokens of your own instead."
        )
    shown = counted("warming up", len(answers))
    with torch.no_grad(), _plain_generation(model), having(waits=True), shown as advance:
        for answer in answers:
            advance(str(answer))
            _give(model, answer, text.vocab_size, turns=turns and not answer.beams)


def _text_config(model: nn.Module) -> Any:
    """The config of the model's decoder.

    Raises:
        ConfigError: If its `generate()` can't be called with ids alone, or runs uncompiled.
    """
    if getattr(model, "_compiled_call_impl", None) is None or options_of(model) is None:
        raise ConfigError(
            "warm_up() got a model whose generate() doesn't run compiled with this backend: call"
            " specache_fx.compile(model, ...) first. generate() of torch.compile(model) runs the plain model."
        )
    if model.training:
        raise ConfigError(
            "warm_up() got a model in training mode, whose graphs are others: call model.eval() first."
        )
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    takes_ids = getattr(model, "main_input_name", "") == "input_ids" and not config.is_encoder_decoder
    if not hasattr(model, "generate") or not takes_ids or not isinstance(text.vocab_size, int):
        raise ConfigError(
            "warm_up() calls generate() of a decoder with random token ids, and this model is none. Run prompts of two"
            " lengths and a few tokens of each instead."
        )
    return text


@contextmanager
def _plain_generation(model: nn.Module) -> Iterator[None]:
    """Within it, `generate()` has no settings of the model's, such as several sequences, stops or a static cache."""
    from transformers import GenerationConfig

    with ExitStack() as stack:
        for each in with_generators(model):
            if hasattr(each, "generation_config"):
                stack.callback(setattr, each, "generation_config", each.generation_config)
                each.generation_config = GenerationConfig()
        yield


def _answers(text: Any, batch_sizes: Sequence[int]) -> Iterator[Answer]:
    """What a process may be asked: prompts of some lengths, and around a window's length."""
    window, most = getattr(text, "sliding_window", None), getattr(text, "max_position_embeddings", None)
    lengths = [*_LENGTHS]
    if isinstance(window, int):
        lengths += [max(1, window - _STEPS // 2), window + _LENGTHS[0]]
    lengths = [each for each in dict.fromkeys(lengths) if not most or each + 2 * _STEPS + _TURN <= most]
    for batch_size in batch_sizes:
        for length in lengths:
            yield Answer(batch_size, length)
            if batch_size > 1:
                yield Answer(batch_size, length, padded=True)
                yield Answer(batch_size, length, beams=True)
    if batch_sizes[0] == 1 and len(batch_sizes) > 1:
        # One row has a graph of its own, and any row now one of several rows too: Dynamo takes the one that ran last.
        yield from (Answer(1, length) for length in lengths)


def _give(model: Any, answer: Answer, vocab_size: int, *, turns: bool) -> None:
    """Generate it, and a further turn."""
    device = next(model.parameters()).device
    draw = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    ids = torch.randint(vocab_size, (answer.batch_size, answer.length + _TURN), generator=draw).to(device)
    mask = torch.ones_like(ids)
    if answer.padded:
        mask[0, : answer.length // 2] = 0
    given: dict[str, Any] = {
        "max_new_tokens": _STEPS,
        "min_new_tokens": _STEPS,
        "do_sample": False,
        "num_beams": answer.batch_size if answer.beams else 1,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    rows = 1 if answer.beams else answer.batch_size
    prompt = slice(rows), slice(answer.length)
    out = model.generate(ids[prompt], attention_mask=mask[prompt], **given)
    if turns:
        longer = torch.cat([out.sequences, ids[:, answer.length :]], 1)
        shown = mask.new_ones(answer.batch_size, longer.shape[1] - answer.length)
        shown = torch.cat([mask[prompt], shown], 1)
        model.generate(longer, attention_mask=shown, past_key_values=out.past_key_values, **given)

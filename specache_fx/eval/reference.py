"""What the full cache says of a text: the plain model, as the measure of every other method."""

from __future__ import annotations

from collections import OrderedDict

import torch
from transformers import PreTrainedModel

from specache_fx.compiled import uncompiled
from specache_fx.eval.decode import Forced, Sampling, choose, decode
from specache_fx.eval.reading import DEFAULT_LIMIT, Reader

_CHUNK = 32  # tokens whose logits are held at once


class Reference:
    """The plain model behind prompts; remembers the newest distributions up to a number of bytes.

    Args:
        model: Its compiled form, if it has one, is not used.
        reader: Reads the prompts.
        limit: Bytes.
    """

    def __init__(self, model: PreTrainedModel, reader: Reader, limit: int = DEFAULT_LIMIT) -> None:
        self._model, self._reader, self._limit = model, reader, limit
        self._kept: OrderedDict[tuple[bytes, bytes], torch.Tensor] = OrderedDict()
        self._continued: dict[tuple[bytes, int, Sampling | None], torch.Tensor] = {}

    @torch.inference_mode()
    def log_probs(self, input_ids: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        """The full cache's distributions, decoded step by step as a method decodes: rounding is the same.

        Args:
            input_ids: Prompts, int64 `[batch, prompt_len]`.
            forced: What follows them, int64 `[batch, steps + 1]`.

        Returns:
            float32 `[batch, steps, vocab]`, on the model's device: of all forced tokens but the first.
        """
        key = (input_ids.cpu().numpy().tobytes(), forced.cpu().numpy().tobytes())
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        read = self._reader.read(input_ids)
        batch, steps = forced.shape[0], forced.shape[1] - 1
        found = read.logits.new_empty(batch, steps, read.logits.shape[-1], dtype=torch.float32)
        # Room is made first: one alone may take as much as all may.
        while self._kept and found.nbytes + sum(each.nbytes for each in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
        with uncompiled(self._model):
            decode(self._model, read.logits, read.copy(), _Recorded(forced, found))
        self._kept[key] = found
        return found

    @torch.inference_mode()
    def continuation(
        self, input_ids: torch.Tensor, new_tokens: int, sampling: Sampling | None
    ) -> torch.Tensor:
        """How the full cache goes on, int64 `[batch, new_tokens]`, on the CPU."""
        key = (input_ids.cpu().numpy().tobytes(), new_tokens, sampling)
        if key not in self._continued:
            read, chooser = self._reader.read(input_ids), choose(new_tokens, frozenset(), sampling)
            with uncompiled(self._model):
                decode(self._model, read.logits, read.copy(), chooser)
            self._continued[key] = torch.tensor(chooser.ids())
        return self._continued[key]

    @torch.inference_mode()
    def losses(self, input_ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """How unlikely a continuation is to the full cache, in nats a token.

        Args:
            input_ids: Prompts, int64 `[batch, prompt_len]`.
            tokens: What a method continued them with, int64 `[batch, num_tokens]`.

        Returns:
            float32 `[batch, num_tokens]`, on the CPU.
        """
        read = self._reader.read(input_ids)
        tokens = tokens.to(read.logits.device)
        cache, logits, found = read.copy(), read.logits[:, None], []
        with uncompiled(self._model):
            for start in range(0, tokens.shape[1], _CHUNK):
                chunk = tokens[:, start : start + _CHUNK]
                out = self._model(input_ids=chunk, past_key_values=cache, use_cache=True)
                predicted = torch.cat([logits, out.logits[:, :-1]], dim=1).float()
                found.append(
                    torch.nn.functional.cross_entropy(predicted.transpose(1, 2), chunk, reduction="none")
                )
                cache, logits = out.past_key_values, out.logits[:, -1:]
        return torch.cat(found, dim=1).cpu()


class _Recorded(Forced):
    """Given tokens, and the distributions that predict them written to `found`."""

    def __init__(self, tokens: torch.Tensor, found: torch.Tensor) -> None:
        super().__init__(tokens)
        self._found = found

    def predicted(self, logits: torch.Tensor, expected: torch.Tensor, step: int) -> None:
        """See `Forced`."""
        self._found[:, step] = torch.log_softmax(logits.float(), dim=-1)

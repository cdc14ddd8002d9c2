"""`specache-hf`, a model of lm-eval: `hf` with our cache. RULER and LongBench are lm-eval's tasks.

    specache-bench lm-eval run --model specache-hf --model_args pretrained=FOLDER,bits=2 --tasks ruler,longbench

Options of `SpecacheConfig` go among `--model_args`; all others are `hf`'s. lm-eval versions that read the entry points
`lm_eval.models` know the model by themselves.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import specache_fx
from specache_bench.decode import Decoder, Forced, decode
from specache_fx.compiled import uncompiled
from specache_fx.config import SpecacheConfig


@register_model("specache-hf")
class SpecacheLM(HFLM):
    """`hf` compiled with `backend="specache"`.

    The likelihood of a continuation is measured by decoding: a forward pass over all of it would read no code. Contexts
    are read by the plain model, as a prompt is.
    """

    def __init__(self, pretrained: Any, device: str | None = None, **arguments: Any) -> None:
        names = {field.name for field in fields(SpecacheConfig)} & arguments.keys()
        options = {name: arguments.pop(name) for name in names}
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained=pretrained, backend="causal", device=place, **arguments)
        specache_fx.compile(self.model, **options)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        found = []
        for _, context, continuation in requests:
            ids = torch.tensor([[*context, *continuation]], device=self.device)[:, -self.max_length - 1 :]
            start = ids.shape[1] - len(continuation)
            with uncompiled(self.model):
                out = self.model(input_ids=ids[:, :start], use_cache=True)
            first = torch.log_softmax(out.logits[0, -1].float(), dim=-1)
            total, greedy = float(first[continuation[0]]), int(first.argmax()) == continuation[0]
            if len(continuation) > 1:
                kept = torch.empty(1, len(continuation) - 1, first.shape[-1], device=self.device)
                forced = Forced(ids[:, start:], keep=kept)
                decode(Decoder(self.model, out.past_key_values, out.logits[:, -1]), forced)
                total -= float(forced.losses().sum())
                greedy &= kept[0].argmax(-1).tolist() == list(continuation[1:])
            found.append((total, greedy))
        return found


def main(arguments: list[str]) -> None:
    """Run lm-eval's command line, with this model known to it."""
    import sys

    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()

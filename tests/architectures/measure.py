"""One model type, measured: eager against compiled, token by token, both lanes.

Runs in a process of its own (`walk.py`): whatever a model does to Dynamo ends with it.
"""

from __future__ import annotations

import math
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from architectures.configs import GENERATE, NOT_BUILT, PAD_TOKEN_ID, VOCAB_SIZE, build
from torch import Tensor
from torch.fx import GraphModule

import specache_fx.backend
from specache_fx.backend import Backend
from specache_fx.calls.dispatcher import Dispatcher
from specache_fx.capture.program import Program
from specache_fx.compiled import uncompile
from specache_fx.config import SpecacheConfig
from specache_fx.runners.decode_runner import Decode, DecodeGraph
from specache_fx.runtime.session import decode_step
from specache_fx.runtime.session.session import Session

NEW_TOKENS = 24
PROMPT_LEN = 12
PADDING = 5
# Of the largest logit: compiled float32 sums in another order, and a few layers add up.
TOLERANCE = 2e-5

_OPTIONS: dict[str, Any] = {"group_size": 8, "residual_length": 8, "lowering": "eager", "lookahead": "token"}
EXACT: dict[str, Any] = {**_OPTIONS, "bits": 16, "top_k": 8}
ALL_PREFETCHED: dict[str, Any] = {**_OPTIONS, "bits": 1, "top_k": PROMPT_LEN + NEW_TOKENS}
# Name of a case: options, whether the first row is padded on the left.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "bits 16, padded": (EXACT, True),
    "bits 16": (EXACT, False),
    "top_k all, padded": (ALL_PREFETCHED, True),
}


@dataclass
class Eager:
    """What the plain model says: tokens `[batch, new]`, logits `[new, batch, vocab]`."""

    tokens: Tensor
    logits: Tensor
    cache: Any


@dataclass
class Watch:
    """What a compiled run did, seen from inside."""

    eager: Eager
    programs: list[Program] = field(default_factory=list)
    layers: Counter[int] = field(default_factory=Counter)  # by step: attentions that ran rewritten
    runners: list[Decode] = field(default_factory=list)  # those that ran
    starts: dict[int, int] = field(default_factory=dict)  # by session: tokens held at its first decode step
    session: Session | None = None  # whose step runs
    lane_differences: list[float] = field(default_factory=list)

    def observe(self, name: str, gm: GraphModule, program: Program) -> None:
        """Note each graph once."""
        if name == "dynamo":
            self.programs.append(program)
        elif name in ("analyse", "leave_alone"):
            self.programs[-1] = program

    def decode_class(watch) -> type[Decode]:
        """A `Decode` that is given the true next token for its second lane, and whose second lane is compared."""

        class Watched(Decode):
            def _step(
                self,
                session: Session,
                args: Sequence[Any],
                biases: list[Tensor | None],
                ahead: int,
                *more: Any,
                **named: Any,
            ) -> tuple[list[Any], bool]:
                start = watch.starts.setdefault(session.number, session.kv_len)
                step = session.kv_len - start
                if ahead and session.speculative_token is not None and step + 1 < NEW_TOKENS:
                    token = session.speculative_token
                    session.speculative_token = (
                        watch.eager.tokens[:, step + 1].reshape(token.shape).to(token.dtype)
                    )
                watch.session = session
                outputs = super()._step(session, args, biases, ahead, *more, **named)
                if ahead:
                    watch.layers[step] += len(self._layers)
                    watch.runners.append(self)
                return outputs

            def _compile(self, inputs: list[Any], session: Session) -> DecodeGraph | None:
                made = super()._compile(inputs, session)
                if made is None or self.lanes == 1 or self._decoding.logits is None:
                    return made
                logits = self._decoding.logits

                def compared(*args: Any) -> Any:
                    results, session = made.compiled(*args), watch.session
                    assert session is not None
                    run = decode_step.by_state(session.state)
                    step = session.kv_len - watch.starts[session.number]
                    # Where the next position or window can't be told the second lane is void, and speculation
                    # starts over with the next token.
                    used = self._sources.knows_next and run.windows_known
                    if used and not run.predecoding and step + 2 < NEW_TOKENS:
                        watch.lane_differences.append(
                            difference(results[logits][1][:, -1], watch.eager.logits[step + 2])
                        )
                    return results

                return made._replace(compiled=compared)

        return Watched


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference, as a share of the largest logit; NaN if ours is not finite."""
    if not ours.isfinite().all() and theirs.isfinite().all():
        return float("nan")
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def largest(values: Iterable[float | None]) -> float | None:
    """NaN is larger than any number; None where there is no value."""
    known = [value for value in values if value is not None]
    return max(known, default=None, key=lambda value: (math.isnan(value), value))


def _prompt(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCAB_SIZE, (2, PROMPT_LEN), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :PADDING] = 0
    return {"input_ids": torch.where(mask.bool(), ids, PAD_TOKEN_ID), "attention_mask": mask}


def _generate(model: Any, model_type: str, padded: bool) -> Eager:
    out = model.generate(
        **_prompt(padded),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **GENERATE.get(model_type, {}),
    )
    return Eager(out.sequences[:, -NEW_TOKENS:], torch.stack(out.logits), out.get("past_key_values"))


def _plain(reason: str) -> str:
    """Without the numbers of FX's node names, which differ from graph to graph, and where packages are installed."""
    return re.sub(r"/[^ \"`(]*?/site-packages/", "", re.sub(r"`(\w+?)_\d+`", r"`\1`", reason))


def _where(error: BaseException) -> str:
    """The innermost lines of the project and of the model."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:]))


def _brief(error: BaseException, limit: int = 400) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:limit]}"


def _kv_layers(cache: Any) -> tuple[int, list[str]]:
    """How many layers of a cache hold keys, and the kinds of all its layers."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", [])
    held = [
        layer
        for layer in layers
        if isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.dim() == 4
    ]
    return len(held), sorted({type(layer).__name__ for layer in layers})


def _case(
    model: Any, model_type: str, eager: Eager, options: dict[str, Any], padded: bool, untraced: bool = False
) -> dict[str, Any]:
    """One compiled run against eager's."""
    watch = Watch(eager)
    specache_fx.backend.Decode = watch.decode_class()
    torch._dynamo.reset()
    row: dict[str, Any] = {}
    try:
        model.compile(backend=partial(Backend(), options=options, observe=watch.observe))
        if untraced:
            graphs = SpecacheConfig(**options)
            model._compiled_call_impl = Dispatcher(
                model, model._compiled_call_impl, graphs, is_auto=False, warm="block"
            )
        ours = _generate(model, model_type, padded)
        equal = (ours.tokens == eager.tokens).all(dim=0)
        until = NEW_TOKENS if equal.all() else int(equal.int().argmin()) + 1
        row["tokens_equal"] = bool(equal.all())
        row["difference"] = difference(ours.logits[:until], eager.logits[:until])
    except Exception as error:
        row["error"] = f"{_plain(_brief(error))} [{_where(error)}]"
    finally:
        specache_fx.backend.Decode = Decode
        uncompile(model)
    row["lane_difference"] = largest(watch.lane_differences)
    row["rewritten"] = max(watch.layers.values(), default=0)
    row["lanes"] = min((runner.lanes for runner in watch.runners), default=0)
    row["fallback"] = next((_plain(runner.fallback) for runner in watch.runners if runner.fallback), None)
    row["refusals"] = list(
        dict.fromkeys(_plain(refusal.reason) for program in watch.programs for refusal in program.refusals)
    )
    row["graphs"] = len(watch.programs)
    return row


def verdict(kv_layers: int, cases: dict[str, dict[str, Any]]) -> str:
    """One word for a type."""
    rows = list(cases.values())
    if any("error" in row for row in rows):
        return "error"
    if any(math.isnan(row["difference"]) for row in rows):
        return "NaN"
    if any(row["difference"] > TOLERANCE for row in rows):
        return "WRONG"
    if any(row["lane_difference"] is not None and not row["lane_difference"] <= TOLERANCE for row in rows):
        return "lane wrong"
    rewritten = min(row["rewritten"] for row in rows)
    if rewritten == 0:
        return "left alone"
    return "rewritten" if rewritten >= kv_layers else "partly"


def measure(model_type: str, names: Iterable[str] = CASES) -> dict[str, Any]:
    """The row of a type.

    Args:
        model_type: One of `TYPES`.
        names: Which of `CASES` to run.
    """
    if model_type in NOT_BUILT:
        return {"verdict": "not built", "reason": NOT_BUILT[model_type]}
    try:
        model: Any = build(model_type)
        eager = {padded: _generate(model, model_type, padded) for padded in (True, False)}
    except Exception as error:
        return {"verdict": "not built", "reason": f"transformers itself: {_brief(error)} [{_where(error)}]"}
    kv_layers, kinds = _kv_layers(eager[True].cache)
    cases: dict[str, dict[str, Any]] = {}
    for name in names:
        options, padded = CASES[name]
        if options is EXACT or any(row["rewritten"] for row in cases.values()):  # else no option has a say
            cases[name] = _case(model, model_type, eager[padded], options, padded)
    row = {
        "verdict": verdict(kv_layers, cases),
        "kv_layers": kv_layers,
        "cache": kinds,
        "attention": model.config._attn_implementation,
        "cases": cases,
    }
    if names is CASES and row["attention"] != "eager" and row["verdict"] in ("rewritten", "partly"):
        row["eager attention"] = with_eager_attention(model_type, kv_layers)
    return row


def with_eager_attention(model_type: str, kv_layers: int) -> dict[str, Any]:
    """A padded batch at 16 bits, where attention is spelt out: verdict and case."""
    model = build(model_type, "eager")
    case = _case(model, model_type, _generate(model, model_type, padded=True), EXACT, padded=True)
    return {"verdict": verdict(kv_layers, {"eager attention": case}), "case": case}


def with_untraced_prompts(model_type: str) -> dict[str, Any]:
    """A padded batch at 16 bits whose prompt runs as the model is: its case."""
    model = build(model_type)
    eager = _generate(model, model_type, padded=True)
    return _case(model, model_type, eager, EXACT, padded=True, untraced=True)

"""How much of a model's own attention is caught by the pairs that a method keeps. Paper: SpeCache §3.1, Figure 2 left.

The model runs whole, uncompiled, and its real attention weights say what each query looks at. Three ways of keeping k
pairs for it are then followed token by token:

- top-k: the k pairs that this query attends to most (what SpeCache prefetches, if it guesses right);
- H2O: half of the k are the newest, half those with the most attention so far; what is evicted never comes back;
- TOVA: the pair that the newest query attends to least is evicted.

H2O and TOVA evict from the first token on, as the paper's "greedy eviction" does; their authors read a prompt whole
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specache_fx.compiled import uncompiled
from specache_fx.errors import ConfigError
from specache_fx.eval.bench import Bench
from specache_fx.eval.sample import Sample

Weights = NDArray[np.float32]
"""Of one layer: `[num_kv_heads, q_len, kv_len]`, the mean over the query heads of a group, 0 above the diagonal."""


@torch.inference_mode()
def layer_weights(model: PreTrainedModel, input_ids: torch.Tensor, use: Callable[[Weights], None]) -> None:
    """Run a model once, uncompiled, and hand over the attention weights of each layer in turn.

    Args:
        model: A causal language model of transformers.
        input_ids: int64 `[1, len]`.
        use: Called once a layer; the weights are dropped after that, since they take much memory.

    Raises:
        ConfigError: If the model doesn't show its weights.
    """
    config = model.config.get_text_config(decoder=True)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    seen = 0

    def take(module: Any, arguments: Any, output: Any) -> None:
        nonlocal seen
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if isinstance(weights, torch.Tensor) and weights.dim() == 4:
            seen += 1
            grouped = weights[0].float().unflatten(0, (num_kv_heads, -1)).mean(dim=1)
            # 16-bit weights don't add up to 1.
            use((grouped / grouped.sum(dim=-1, keepdim=True)).cpu().numpy())

    with _eager(model):
        hooks = [
            module.register_forward_hook(take)
            for module in model.modules()
            if type(module).__name__.endswith("Attention")
        ]
        try:
            model(input_ids=input_ids.to(model.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    if not seen:
        raise ConfigError(
            f"{type(model).__name__} doesn't return its attention weights with attn_implementation='eager': choose a"
            " model that does, such as a Llama."
        )


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with uncompiled(model):
            yield
    finally:
        model.set_attn_implementation(before)


def topk(weights: Weights, budgets: Sequence[int]) -> NDArray[np.float64]:
    """Attention on the k pairs that each query attends to most.

    Args:
        weights: Of one layer.
        budgets: Numbers of pairs, each at least 1.

    Returns:
        `[len(budgets), q_len]`, the mean over kv heads.
    """
    largest = min(max(budgets), weights.shape[-1])
    sums = torch.from_numpy(weights).topk(largest, dim=-1).values.cumsum(dim=-1)
    return np.stack([sums[..., min(k, largest) - 1].double().mean(dim=0).numpy() for k in budgets])


def h2o(weights: Weights, budget: int) -> NDArray[np.float64]:
    """Attention on what H2O keeps: `budget` pairs, always the newest half of them. `[q_len]`, mean over kv heads."""
    recent = max(budget // 2, 1)

    def rank(places: NDArray[np.intp], total: Weights, last: Weights, now: int) -> Weights:
        return np.where(places <= now - recent, total, np.inf).astype(np.float32)

    return _greedy(weights, budget, rank)


def tova(weights: Weights, budget: int) -> NDArray[np.float64]:
    """Attention on what TOVA keeps: the pair that the newest query saw least goes. `[q_len]`, mean over kv heads."""
    return _greedy(weights, budget, lambda places, total, last, now: last)


def _greedy(weights: Weights, budget: int, rank: Callable[..., Weights]) -> NDArray[np.float64]:
    heads, length = weights.shape[:2]
    head = np.arange(heads)
    places = np.zeros((heads, min(budget, length)), dtype=np.intp)
    # As a method sees them, that is over what it kept: all attention so far, and the newest query's.
    total, last = np.zeros(places.shape, np.float32), np.zeros(places.shape, np.float32)
    caught = np.empty(length)
    for now in range(length):
        held = min(now + 1, budget)
        if now < budget:
            places[:, now] = now
        else:
            evicted = rank(places, total, last, now).argmin(axis=1)
            places[head, evicted] = now
            total[head, evicted] = 0
        seen = weights[head[:, None], now, places[:, :held]]
        mass = seen.sum(axis=1, keepdims=True)
        caught[now] = mass.mean()
        last[:, :held] = seen / np.maximum(mass, 1e-30)
        total[:, :held] += last[:, :held]
    return caught


def measure(
    model: PreTrainedModel, sequences: Sequence[tuple[torch.Tensor, int]], shares: Sequence[float]
) -> dict[str, Any]:
    """Shares of attention caught, by the share of the context that is kept.

    Args:
        model: A causal language model.
        sequences: Each int64 `[1, len]`, a prompt with what the model made of it, and the prompt's length.
        shares: Of the prompt's tokens that are kept, 0 to 1.

    Returns:
        For "topk", "h2o" and "tova" the means by share over prompts, layers and kv heads, once for the queries of the
        prompt's second half ("prompt") and once for those that the answer came from ("answer").
    """
    sums: dict[str, list[NDArray[np.float64]]] = {}
    for input_ids, prompt_len in sequences:
        budgets = [max(2, round(share * prompt_len)) for share in shares]
        queries = {"prompt": slice(prompt_len // 2, prompt_len - 1), "answer": slice(prompt_len - 1, -1)}

        def use(weights: Weights, budgets: list[int] = budgets, queries: dict[str, slice] = queries) -> None:
            found = {
                "topk": topk(weights, budgets),
                "h2o": np.stack([h2o(weights, budget) for budget in budgets]),
                "tova": np.stack([tova(weights, budget) for budget in budgets]),
            }
            for method, caught in found.items():
                for part, where in queries.items():
                    sums.setdefault(f"{method}_{part}", []).append(caught[:, where].mean(axis=1))

        layer_weights(model, input_ids, use)
    means = {name: np.mean(found, axis=0).tolist() for name, found in sums.items()}
    return {"shares": list(shares), **means}


def probe(bench: Bench, samples: list[Sample], options: Mapping[str, Any]) -> dict[str, Any]:
    """`measure` on prompts and what the full model makes of them.

    Args:
        bench: Whose model runs no method.
        samples: Prompts.
        options: `shares`, as `measure` takes them.
    """
    sequences = []
    for sample in samples:
        ids = torch.tensor([bench.encode(sample.prompt)], device=bench.model.device)
        whole = bench.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sample.max_new_tokens,
            do_sample=False,
        )
        sequences.append((whole, ids.shape[1]))
    return measure(bench.model, sequences, options["shares"])

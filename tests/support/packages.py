"""Small real packages: a GGUF file of a tiny llama, wheels that pip finds in a folder, and R's database of strings."""

from __future__ import annotations

import base64
import hashlib
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

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

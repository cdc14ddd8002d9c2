"""A worker in the environment of `make peers-cpu`: decode steps of OpenVINO or llama.cpp. It has no specache_fx.

    python cpu_worker.py openvino|llama.cpp KV MODEL_FOLDER float32|bfloat16 BATCH KV_LEN ROOM THREADS

Its first line (see `worker_loop`) has "device_bytes" too: the cache, in the format KV, holds KV_LEN tokens of each
sequence. {"steps": n} is answered with {"seconds": [...], "tokens": [[...], ...]}: of each greedy step its time, and a
token a sequence.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specache_bench.worker_loop import Answer, serve

_PROMPT = 64  # tokens that llama.cpp reads: its cache repeats them
_CHUNK = 512  # tokens that OpenVINO reads at a time
_FIRST = 7  # the token that comes first


class OpenVino:
    """A stateful model, exported once into the model's folder. Its cache, in u8, is filled with random numbers.

    In u4 it reads random words instead, which takes long: OpenVINO 2026.4 corrupts memory where such a state is set.
    """

    packages = "openvino", "optimum-intel"

    def __init__(
        self, kv: str, folder: Path, dtype: str, batch: int, kv_len: int, room: int, threads: int
    ) -> None:
        import openvino

        exported = folder / "openvino"
        if not exported.exists():
            from optimum.intel import OVModelForCausalLM

            model = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, load_in_8bit=False)
            model.save_pretrained(exported)
        settings = {
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
            "KV_CACHE_PRECISION": kv,
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        compiled = openvino.Core().compile_model(exported / "openvino_model.xml", "CPU", settings)
        self._request, self._batch, self._held = compiled.create_infer_request(), batch, 0
        self.tokens: list[int] = []
        self._names = {name for port in compiled.inputs for name in port.names}
        config = json.loads((folder / "config.json").read_text())
        random = np.random.default_rng(0)
        words = random.integers(0, config["vocab_size"], (batch, kv_len))
        # The first inference gives the states their shapes.
        for start in range(0, kv_len if kv == "u4" else min(kv_len, 1), _CHUNK):
            self._infer(words[:, start : start + _CHUNK] if kv == "u4" else words[:, :1])
        rows = 0
        for state in self._request.query_state() if kv_len else ():
            heads, dim = state.state.shape[1], state.state.shape[3]
            rows += batch * heads * kv_len
            if kv != "u4":
                random_rows = random.standard_normal((batch, heads, kv_len, dim), dtype=np.float32)
                state.state = openvino.Tensor(random_rows)
        scales = 8  # bytes a row: a scale and a zero in float32
        self.device_bytes = rows * (config["head_dim"] * int(kv[1:]) // 8 + scales)
        self._held, self.tokens = kv_len, [_FIRST] * batch

    def step(self) -> None:
        """One token."""
        self._infer(np.array(self.tokens, dtype=np.int64)[:, None])

    def _infer(self, tokens: Any) -> None:
        places = np.arange(self._held, self._held + tokens.shape[1])
        inputs = {
            "input_ids": tokens,
            "attention_mask": np.ones((self._batch, places[-1] + 1), dtype=np.int64),
            "position_ids": np.tile(places, (self._batch, 1)),
            "beam_idx": np.arange(self._batch, dtype=np.int32),
        }
        self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        self._held += tokens.shape[1]
        self.tokens = self._request.get_tensor("logits").data[:, -1].argmax(-1).tolist()


class LlamaCpp:
    """A GGUF file, written once into the model's folder. Its cache, in f16 or q8_0, repeats a short prompt."""

    packages = ("llama_cpp_python",)

    def __init__(
        self, kv: str, folder: Path, dtype: str, batch: int, kv_len: int, room: int, threads: int
    ) -> None:
        import llama_cpp

        self._api, self._batch, self._held = llama_cpp, batch, kv_len
        file = folder / "model.gguf"
        if not file.exists():
            write_gguf(folder, file, dtype)
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = batch * (kv_len + room), batch
        settings.n_batch = settings.n_ubatch = max(_PROMPT, batch)
        settings.n_threads = settings.n_threads_batch = threads
        # It takes three times as long at 16,384 tokens on a CPU in this version, but values in q8_0 need it.
        settings.flash_attn_type = int(kv == "q8_0")
        form = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}[kv]
        settings.type_k = settings.type_v = form
        settings.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context with a cache in {kv}")
        self._words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._rows = llama_cpp.llama_batch_init(max(_PROMPT, batch), 0, 1)
        words = np.random.default_rng(0).integers(0, self._words, min(_PROMPT, kv_len))
        if kv_len:
            self._decode([(int(word), i, 0, False) for i, word in enumerate(words)])
            self._fill(kv_len)
        self.tokens = [_FIRST] * batch
        config = json.loads((folder / "config.json").read_text())
        elements = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        bits = {"f16": 16, "q8_0": 8.5}[kv]  # 32 bytes and a scale in f16
        self.device_bytes = int(batch * kv_len * elements * bits / 8)

    def _fill(self, kv_len: int) -> None:
        """Give every sequence so many tokens, those of sequence 0 again and again: nobody has to read them."""
        api, context = self._api, self._context
        size = api.llama_state_seq_get_size(context, 0)
        state = (ctypes.c_uint8 * size)()
        if api.llama_state_seq_get_data(context, state, size, 0) != size:
            raise RuntimeError("llama_state_seq_get_data gave another size")
        grown = repeated(bytes(state), kv_len)
        whole = (ctypes.c_uint8 * len(grown)).from_buffer(grown)
        for row in range(self._batch):
            if api.llama_state_seq_set_data(context, whole, len(grown), row) != len(grown):
                raise RuntimeError(f"llama.cpp takes no cache of {kv_len} tokens for sequence {row}")

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Tokens, each with position, sequence and whether its logits are wanted."""
        batch = self._rows
        batch.n_tokens = len(rows)
        for i, (token, position, row, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, wanted
        if code := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {code}")

    def step(self) -> None:
        """One token."""
        self._decode([(token, self._held, row, True) for row, token in enumerate(self.tokens)])
        rows = (self._api.llama_get_logits_ith(self._context, row) for row in range(self._batch))
        self.tokens = [int(np.ctypeslib.as_array(logits, (self._words,)).argmax()) for logits in rows]
        self._held += 1


def repeated(state: bytes, kv_len: int) -> bytearray:
    """A sequence's state of llama.cpp with its tokens again and again, at the positions 0 to `kv_len - 1`.

    A state has these fields, in this order:

        two numbers of its format; the count of streams, of which one has tokens
        the count of tokens; of each its position and its one sequence
        whether values lie channel by channel; the count of layers
        of each layer the keys' type, bytes a token, and the keys
        of each layer the values as the keys, or channel by channel: type, bytes an element, channels, and the values
        a count of tokens, 0, of each other stream

    Args:
        state: Of sequence 0.
        kv_len: Tokens that it is to have.

    Raises:
        RuntimeError: If the state has another form.
    """
    at, grown = 0, bytearray()

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        fields = struct.unpack_from(f"={form}", state, at)
        at += struct.calcsize(f"={form}")
        return fields

    def keep(form: str) -> tuple[Any, ...]:
        fields = take(form)
        grown.extend(struct.pack(f"={form}", *fields))
        return fields

    def repeat(rows: int, tokens: int, size: int) -> None:
        nonlocal at
        held = np.frombuffer(state, np.uint8, rows * tokens * size, at).reshape(rows, tokens, size)
        at += held.size
        grown.extend(held[:, np.arange(kv_len) % tokens].tobytes())

    _, _, streams = keep("III")
    (tokens,) = take("I")
    if any(take("iIi") != (i, 1, 0) for i in range(tokens)):
        raise RuntimeError("llama.cpp's state has another form than is known here")
    grown.extend(struct.pack("=I", kv_len))
    for i in range(kv_len):
        grown.extend(struct.pack("=iIi", i, 1, 0))
    by_channel, layers = keep("II")
    for side in range(2 * layers):
        if side >= layers and by_channel:
            _, size, channels = keep("iII")
            repeat(channels, tokens, size)
        else:
            repeat(1, tokens, keep("iQ")[1])
    if any(keep(f"{streams - 1}I")) or at != len(state):
        raise RuntimeError("llama.cpp's state is longer than is known here")
    return grown


def write_gguf(folder: Path, file: Path, dtype: str) -> None:
    """Write a Llama of transformers as a GGUF file, where llama.cpp wants a head's rotary halves interleaved.

    Args:
        folder: Of the model, in safetensors.
        file: To write.
        dtype: Of its matrices, "float32" or "bfloat16"; vectors are in float32.
    """
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    dim, layers = config["head_dim"], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, given in load_file(folder / "model.safetensors").items():
        target, weight = names.get_name(name, try_suffixes=(".weight",)), given
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = given.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten(0, 2)
        if weight.dim() > 1 and dtype == "bfloat16":
            rows = weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(target, weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS: dict[str, Any] = {"openvino": OpenVino, "llama.cpp": LlamaCpp}


def _steps(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    seconds, tokens = [], []
    for _ in range(request["steps"]):
        start = time.perf_counter()
        peer.step()
        seconds.append(time.perf_counter() - start)
        tokens.append(peer.tokens)
    return {"seconds": seconds, "tokens": tokens}


def _start(kind: Any, kv: str, folder: str, dtype: str, *numbers: str) -> tuple[Answer, dict[str, Any]]:
    peer = kind(kv, Path(folder), dtype, *map(int, numbers))
    return partial(_steps, peer), {"device_bytes": peer.device_bytes}


if __name__ == "__main__":
    chosen = KINDS[sys.argv[1]]
    serve(partial(_start, chosen, *sys.argv[2:]), chosen.packages)

"""`Lab`: a model with its tokenizer. It reads each prompt once, and keeps one method open at a time."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specache_bench.decode import Decoder, Forced, Greedy, decode, last_logits_only
from specache_bench.fetch import MODELS, model_folder
from specache_bench.records import Method
from specache_bench.workers import KVPRESS, WorkerProcess
from specache_fx.cli.sizes import DTYPE_BYTES
from specache_fx.compiled import uncompiled
from specache_fx.errors import ConfigError
from specache_fx.examples.suite import MODEL_DIR

READ_LIMIT = 4 << 30  # bytes of prompts' caches, and of distributions, that are kept for the next method


@dataclass(frozen=True)
class Read:
    """A batch of prompts that was read: its whole 16-bit cache, the last token's logits, and the prompts' length."""

    cache: DynamicCache
    logits: torch.Tensor
    prompt_len: int

    def copy(self) -> DynamicCache:
        """A cache of its own for a method to use up."""
        return copy.deepcopy(self.cache)

    def full_bytes(self, kv_len: int) -> int:
        """Bytes of the cache once it holds `kv_len` tokens, for all rows. Layers with a window don't grow past it."""
        total = 0
        for layer in self.cache.layers:
            if (keys := getattr(layer, "keys", None)) is None:
                continue  # a recurrent state, which no method here changes
            held, length = keys.nbytes + layer.values.nbytes, keys.shape[-2]
            window = getattr(layer, "sliding_window", None)
            grown = kv_len if window is None else max(length, min(kv_len, window - 1))
            total += held * grown // length
        return total

    @property
    def nbytes(self) -> int:
        """Bytes that keeping this takes."""
        return self.full_bytes(self.prompt_len) + self.logits.nbytes


class Kept:
    """The newest results by key, up to a number of bytes; one is kept in any case."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept = limit, OrderedDict[Any, Any]()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The kept result, or one that is made now."""
        if key not in self._kept:
            self._kept[key] = make()
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
        return self._kept[key]


class Lab:
    """One model, and any method on the same prompts.

    Args:
        model: A folder, a name on the hub, or one of "suite" (ours), "smollm2", "gemma3" (`make models`).
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        dtype: "bfloat16", "float16" or "float32".
        batch_size: Prompts at a time.

    Raises:
        ConfigError: If the model can't be loaded or the device is not there.
    """

    def __init__(
        self, model: str, *, device: str = "auto", dtype: str = "bfloat16", batch_size: int = 8
    ) -> None:
        self.name, self.dtype, self.batch_size = model, dtype, batch_size
        self.folder, self.model, self.tokenizer = load(model, device, dtype)
        self.samples: dict[Any, list[Any]] = {}
        self._reads, self._references = Kept(READ_LIMIT), Kept(READ_LIMIT)
        self._open: tuple[Method, Any] | None = None
        self._presses: WorkerProcess | None = None

    # Tokens.

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, special tokens included, unless the text begins with one (a chat template's)."""
        first = self.tokenizer.bos_token
        ready = first is not None and prompt.startswith(str(first))
        try:
            ids: list[int] = self.tokenizer(prompt, add_special_tokens=not ready, verbose=False).input_ids
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(
                f"The tokenizer has no tokens for a prompt ({error}). Our own models know their own words only: choose"
                " one of their tasks."
            ) from error
        return ids

    def encode_more(self, text: str) -> list[int]:
        """The tokens of a text that goes on behind others."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of new tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def chat_prompt(self, text: str) -> str:
        """A message in the tokenizer's chat template; a `ConfigError` if it has none."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"The tokenizer of {self.name!r} has no chat template: leave chat out, or give an instruction model."
            )
        message = [{"role": "user", "content": text}]
        return str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        found: set[int] = set()
        for ids in (self.tokenizer.eos_token_id, getattr(self.model.generation_config, "eos_token_id", None)):
            found |= {ids} if isinstance(ids, int) else set(ids or ())
        return frozenset(found)

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    def check_length(self, what: str, num_tokens: int, max_new_tokens: int = 0) -> None:
        """Raise a `ConfigError` where tokens and those to follow are more than the model holds."""
        longest = getattr(self._config, "max_position_embeddings", None)
        if longest is not None and num_tokens + max_new_tokens > longest:
            follow = f", and {max_new_tokens:,} are to follow" if max_new_tokens else ""
            raise ConfigError(
                f"The model {self.name!r} holds {longest:,} tokens: {what} has {num_tokens:,}{follow}. Ask for a"
                " smaller length."
            )

    # The plain model.

    @torch.inference_mode()
    def read(self, input_ids: torch.Tensor) -> Read:
        """Prefill prompts with the plain model, int64 `[batch, prompt_len]`, or remember it."""

        def make() -> Read:
            with uncompiled(self.model):
                out = self.model(
                    input_ids=input_ids.to(self.model.device),
                    past_key_values=DynamicCache(config=self.model.config),
                    use_cache=True,
                    **last_logits_only(self.model),
                )
            return Read(out.past_key_values, out.logits[:, -1].clone(), input_ids.shape[1])

        return self._reads.get(_key(input_ids), make)

    @torch.inference_mode()
    def log_probs(self, input_ids: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        """The full cache's distributions of forced tokens but the first: float32 `[batch, steps, vocab]`.

        They are decoded step by step as a method decodes: rounding is the same.
        """

        def make() -> torch.Tensor:
            read = self.read(input_ids)
            shape = (forced.shape[0], forced.shape[1] - 1, read.logits.shape[-1])
            found = read.logits.new_empty(shape, dtype=torch.float32)
            with uncompiled(self.model):
                decode(Decoder(self.model, read.copy(), read.logits), Forced(forced, keep=found))
            return found

        return self._references.get((_key(input_ids), _key(forced)), make)

    @torch.inference_mode()
    def answer(self, input_ids: torch.Tensor, chooser: Greedy) -> torch.Tensor:
        """The plain model's continuation of prompts with the full cache, int64 `[batch, new tokens]`."""
        read = self.read(input_ids)
        with uncompiled(self.model):
            decode(Decoder(self.model, read.copy(), read.logits), chooser)
        return torch.tensor(chooser.ids())

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        config = self._config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @property
    def capacity(self) -> int:
        """Tokens of prompts whose caches are kept."""
        heads = getattr(self._config, "num_key_value_heads", None) or self._config.num_attention_heads
        size = self.head_dim * heads * self._config.num_hidden_layers * 2 * self.model.dtype.itemsize
        return int(READ_LIMIT // size)

    # Methods.

    def running(self, method: Method) -> Any:
        """A method that is ready on this model; it stays compiled until another one is asked for."""
        from specache_bench.methods import make_method

        if self._open is None or self._open[0] != method:
            self._leave()
            self._open = (method, make_method(method).open(self))
        return self._open[1]

    @property
    def presses(self) -> WorkerProcess:
        """The worker with kvpress, which is started at first use."""
        if self._presses is None:
            threads = str(torch.get_num_threads())
            arguments = [self.folder, self.dtype, self.model.device.type, threads]
            self._presses = WorkerProcess(KVPRESS, "kvpress_worker.py", arguments)
        return self._presses

    def _leave(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def close(self) -> None:
        """Leave the model as it was, and end the worker."""
        self._leave()
        if self._presses is not None:
            self._presses.close()
            self._presses = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def fingerprint(self) -> str:
        """A hash of the model's weights, configuration and tokenizer."""
        folder = Path(self.folder)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(self.folder, local_files_only=True))
        patterns = ("*.safetensors", "*.json", "*.bin", "*.model")
        return digest_of([path for pattern in patterns for path in folder.glob(pattern)], folder)


def digest_of(paths: Sequence[Path], root: Path) -> str:
    """A hash of files and of their places below a folder."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _key(ids: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(ids.shape), ids.cpu().numpy().tobytes()


def load(model: str, device: str, dtype: str) -> tuple[str, PreTrainedModel, PreTrainedTokenizerBase]:
    """Its folder or name, the model on the device, and the tokenizer; see `Lab`."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={dtype!r}: choose one of {', '.join(DTYPE_BYTES)}.")
    place, folder = device_of(device), model
    if model == "suite":
        folder = str(MODEL_DIR)
    elif model in MODELS:
        folder = str(model_folder(model))
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(
            f"There is no folder {model}: give --model the folder of a model, or a name on the hub."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"The model {model!r} can't be loaded ({str(error).strip().splitlines()[0]}). Give a folder of a causal"
            f" language model with its tokenizer, a name on the hub, or one of {', '.join(('suite', *MODELS))}."
        ) from error
    return folder, loaded.eval().to(place), tokenizer


def device_of(name: str) -> torch.device:
    """The device of a name, "auto" is CUDA where there is one; a `ConfigError` if it is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name!r}: choose one of auto, cpu, cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device="cuda": PyTorch finds no CUDA device here. Use device="cpu" or "auto".')
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)

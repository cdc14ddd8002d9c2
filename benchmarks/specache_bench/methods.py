"""The table of methods. A new one is a class here, or an option of one, and a line in `METHODS`.

A method of this process is a `CacheMethod`: it turns the 16-bit cache of a prompt into a cache of its own and counts
its bytes. A press of kvpress (`Evicting`), OpenVINO and llama.cpp (`CpuPeer`) run in other environments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, QuantizedCache
from transformers.cache_utils import DynamicLayer

import specache_fx
from specache_bench.decode import Decoder, Forced, Greedy, Sampled, decode
from specache_bench.lab import Lab
from specache_bench.records import Method, check_options
from specache_bench.workers import CPU_PEERS, WorkerProcess
from specache_fx.compiled import uncompile
from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError, ConfigError


@dataclass(frozen=True)
class Footprint:
    """The bytes of one batch's cache at this moment, counted on its tensors, and what it did (rates, counts)."""

    device_bytes: int
    host_bytes: int = 0
    stats: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Generated:
    """The results of one batch.

    Attributes:
        ids: New tokens of each row, up to and without the first stop token.
        footprint: At the end.
        full_bytes: Of the full cache at the same length, for all rows.
        step_ms: Of each decode step that is no warm-up: neither a batch's first nor one that compiles.
        losses: Of forced tokens, float32 `[batch, steps]`.
        kl: Of forced tokens, where their distributions are here; float32 `[batch, steps]`.
        same_top: As `kl`; bool.
    """

    ids: list[list[int]]
    footprint: Footprint
    full_bytes: int
    step_ms: list[float]
    losses: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    same_top: torch.Tensor | None = None


@dataclass(frozen=True)
class Asked:
    """Prompts of equal length, and what is to follow them.

    Attributes:
        prompts: int64 `[batch, prompt_len]`.
        max_new_tokens: Of an answer.
        stop_ids: Tokens that end it.
        turns: Tokens to read behind what is there, each followed by an answer: none behind the prompt itself.
        forced: In place of answers: given tokens, int64 `[batch, steps + 1]`.
        seed: Answers are drawn at temperature 1, by this seed; None: they are greedy.
    """

    prompts: torch.Tensor
    max_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    turns: Sequence[Sequence[int]] = ((),)
    forced: torch.Tensor | None = None
    seed: int | None = None

    def answerer(self) -> Greedy:
        """Chooses the tokens of one answer."""
        if self.seed is not None:
            return Sampled(self.max_new_tokens, self.seed)
        return Greedy(self.max_new_tokens, self.stop_ids)


class CacheMethod:
    """A method of this process.

    Attributes:
        defaults: Options and their values; no others are taken, unless `check` says otherwise.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.options = name, self.check(name, options)

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with defaults filled in; a `ConfigError` on an unknown one or a bad value."""
        check_options(f"Method {name!r}", options, cls.defaults)
        return {**cls.defaults, **options}

    def open(self, lab: Lab) -> Self:
        """Make it ready on a model."""
        self._lab, self._warm = lab, set[int]()
        torch._dynamo.reset()  # graphs of another method would count against the limits of compiling
        self.prepare(lab.model)
        return self

    def prepare(self, model: PreTrainedModel) -> None:
        """Change the model, such as compile it."""

    def begin(self, model: PreTrainedModel, cache: Any) -> Any:
        """Turn a prompt's `DynamicCache`, which this may use up, into the cache to decode with."""
        return cache

    def told(self, cache: Any, prompt: torch.Tensor) -> None:
        """Learn a prompt's tokens, int64 `[batch, prompt_len]`: the plain model read them, once for all methods."""

    def measure(self, cache: Any) -> Footprint:
        """The bytes of the cache now."""
        return Footprint(sum(tensor.nbytes for tensor in kv_tensors(cache)))

    @torch.inference_mode()
    def ask(self, asked: Asked) -> Generated:
        """Decode behind prompts that the plain model has read."""
        lab, batch = self._lab, len(asked.prompts)
        read = lab.read(asked.prompts)
        full = None if asked.forced is None else lab.log_probs(asked.prompts, asked.forced)
        decoder = Decoder(lab.model, self.begin(lab.model, read.copy()), read.logits)
        ids: list[list[int]] = []
        step_ms: list[float] = []
        unfed = torch.empty(batch, 0, dtype=torch.int64)  # an answer's last token: chosen, and no more
        for turn in asked.turns:
            if turn:
                told = torch.tensor([turn]).expand(batch, -1)
                decoder.feed(torch.cat([unfed, told], dim=1).to(lab.model.device))
            chooser = asked.answerer() if asked.forced is None else Forced(asked.forced, full)
            before = len(decoder.step_ms)
            decode(decoder, chooser, lambda step, at: None if step else self.told(at, asked.prompts))
            ids += chooser.ids()
            if isinstance(chooser, Greedy):
                unfed = chooser.last
            # A batch's first step takes the prompt's cache over; the first two of a new shape compile.
            step_ms += decoder.step_ms[before + (1 if batch in self._warm and not turn else 2) :]
        self._warm.add(batch)
        footprint = self.measure(decoder.cache)
        made = Generated(ids, footprint, read.full_bytes(read.prompt_len + decoder.num_fed), step_ms)
        if not isinstance(chooser, Forced):
            return made
        return replace(made, losses=chooser.losses(), kl=chooser.kl(), same_top=chooser.same_top())

    def close(self) -> None:
        """Leave the model as it was before."""
        uncompile(self._lab.model)


class Compiled(CacheMethod):
    """transformers' own cache under `torch.compile`."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Compile it."""
        model.compile()


# Of `stats()`, as records have them.
_FIGURES = ("exact_hit_rate", "topk_hit_rate", "attention_hit_rate", "steps", "refetched_steps")
_MOVED = ("prefetched_bytes", "prefetched_rows")  # of one sequence


class Specache(CacheMethod):
    """The backend of this package, by policy: a compiled model takes the prompt's cache over at its first decode step.

    Without `lowering`, graphs run as they are (`"eager"`): a short run would spend its time compiling. `kivi` is the
    low-bit copy alone, with 128 residual tokens: as much memory as SpeCache's 64 and 64 prefetched.
    """

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """`SpecacheConfig` says what is valid."""
        if "policy" in options:
            raise ConfigError(f"Method {name!r} is a policy already: leave the option 'policy' out.")
        own = {"residual_length": 128} if name == "kivi" else {}
        filled = {"lowering": "eager", **own, **options, "policy": name}
        SpecacheConfig.from_options(filled)
        return filled

    def prepare(self, model: PreTrainedModel) -> None:
        """Compile it."""
        specache_fx.compile(model, **self.options)

    def told(self, cache: Any, prompt: torch.Tensor) -> None:
        """Put the prompt into the session's history, of which n-grams are looked up (`on_miss="recover"`)."""
        from specache_fx.runtime.session import registry

        for session in {registry.find(tensor) for tensor in kv_tensors(cache)}:
            if session is not None and session.tokens is not None:
                session.tokens.learn(prompt)

    def measure(self, cache: Any) -> Footprint:
        """The result of `specache_fx.stats`; a `ConfigError` if the model was left as it is."""
        try:
            stats = specache_fx.stats(cache)
        except CacheHandleError as error:
            raise ConfigError(
                f"Method {self.name!r} leaves this model's attention as it is: specache_fx.explain() says why."
            ) from error
        rows = cache.layers[0].keys.shape[0]
        found = {name: getattr(stats, name) for name in _FIGURES}
        found |= {name: getattr(stats, name) / rows for name in _MOVED}
        return Footprint(stats.device_bytes, stats.host_bytes, found)


class Quantized(CacheMethod):
    """transformers' `QuantizedCache` (hqq, quanto, fp8): the whole prompt is quantised, as in `generate()`."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "backend": "hqq",
        **dict.fromkeys(("bits", "group_size", "residual_length", "axis_key", "axis_value")),
    }

    def begin(self, model: PreTrainedModel, cache: Any) -> Any:
        """Put the prompt's keys and values into a new cache, which quantises them; a `ConfigError` if it refuses."""
        options = {**self.options}
        backend, bits, group_size = options.pop("backend"), options.pop("bits"), options.pop("group_size")
        if backend == "hqq" and options["axis_key"] is options["axis_value"] is None:
            # transformers' default, 0, has tokens far apart share a scale.
            options |= {"axis_key": 1, "axis_value": 1}
        try:
            made = QuantizedCache(backend, model.config, nbits=bits, q_group_size=group_size, **options)
            for layer_idx, layer in enumerate(cache.layers):
                made.update(layer.keys, layer.values, layer_idx)
        except ImportError as error:
            package = {"quanto": "optimum-quanto", "hqq": "hqq"}.get(backend, backend)
            raise ConfigError(
                f"Method {self.name!r}: backend {backend!r} needs `pip install {package}`."
            ) from error
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise ConfigError(f"Method {self.name!r} with backend {backend!r}: {error}") from error
        return made

    def measure(self, cache: Any) -> Footprint:
        """Codes, scales, zeros and the 16-bit rest of every layer."""
        return Footprint(sum(x.nbytes for layer in cache.layers for x in plain_tensors(vars(layer))))


@dataclass(frozen=True)
class Press:
    """A class of kvpress, its paper, the attention it needs, and its arguments besides the ratio."""

    name: str
    paper: str
    attention: str = "sdpa"
    options: tuple[tuple[str, Any], ...] = ()


PRESSES: dict[str, Press] = {
    "press:snapkv": Press("SnapKVPress", "SnapKV (Li et al., NeurIPS 2024)"),
    "press:h2o": Press("ObservedAttentionPress", "H2O (Zhang et al., NeurIPS 2023)", "eager"),
    "press:streaming": Press("StreamingLLMPress", "StreamingLLM (Xiao et al., ICLR 2024)"),
    "press:tova": Press("TOVAPress", "TOVA (Oren et al., EMNLP 2024)"),
    "press:knorm": Press("KnormPress", "L2 norm of keys (Devoto et al., EMNLP 2024)"),
    "press:expected": Press("ExpectedAttentionPress", "Expected attention (Devoto et al., 2025)"),
    "press:pyramidkv": Press("PyramidKVPress", "PyramidKV (Cai et al., 2024)"),
    "press:keydiff": Press("KeyDiffPress", "KeyDiff (Park et al., 2025)"),
    "press:lagkv": Press("LagKVPress", "LagKV (Liang et al., 2025)"),
    "press:random": Press("RandomPress", "none: pairs drawn by chance, to be beaten", options=(("seed", 0),)),
}


class Evicting(CacheMethod):
    """`press:NAME`: evicts KV pairs after reading the prompt, in the worker with kvpress. Nothing is evicted later.

    Options: either `bytes`, on the device for one sequence at the end of generation, or `ratio`, the share evicted.
    """

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `CacheMethod`."""
        check_options(f"Method {name!r}", options, {"bytes": 1, "ratio": 0.5})
        budget, ratio = options.get("bytes"), options.get("ratio")
        if (budget is None) == (ratio is None):
            raise ConfigError(
                f"Method {name!r} needs either bytes (of one sequence on the device) or ratio (the share evicted)."
            )
        if ratio is not None and not 0 <= ratio < 1:
            raise ConfigError(f"Method {name!r}: ratio={ratio}: give a number from 0 to below 1.")
        if budget is not None and budget < 1:
            raise ConfigError(f"Method {name!r}: bytes={budget}: give a number of bytes above 0.")
        return {"bytes": budget, "ratio": ratio}

    def open(self, lab: Lab) -> Self:
        """Start the worker, if it has not started yet."""
        self._lab, self._worker = lab, lab.presses
        return self

    def ask(self, asked: Asked) -> Generated:
        """Decode in the worker; a `ConfigError` on several questions, since its caches can't be gone on with."""
        press, budget, forced = PRESSES[self.name], self.options["bytes"], asked.forced
        if asked.seed is not None:
            raise ConfigError(f"{press.name} answers greedily: leave it out where tokens are drawn.")
        if len(asked.turns) != 1:
            raise ConfigError(f"{press.name} answers one question a prompt: leave it out for tasks of turns.")
        with NamedTemporaryFile(suffix=".pt") as full:
            if forced is not None:
                torch.save(self._lab.log_probs(asked.prompts, forced).cpu(), full.name)
            answer = self._worker.ask(
                {
                    "press": press.name,
                    "options": dict(press.options),
                    "attention": press.attention,
                    "ids": asked.prompts.tolist(),
                    "tail": list(asked.turns[0]),
                    "forced": None if forced is None else forced.tolist(),
                    "full": None if forced is None else full.name,
                    "max_new_tokens": asked.max_new_tokens,
                    "stop_ids": sorted(asked.stop_ids),
                    "ratio": self.options["ratio"],
                    "device_bytes": None if budget is None else budget * len(asked.prompts),
                }
            )
        stats = {"compression_ratio": answer["ratio"], "kept_tokens": answer["kept"]}
        footprint = Footprint(answer["device_bytes"], 0, stats)
        named = ("losses", "kl", "same_top")
        by_token = {name: None if answer[name] is None else torch.tensor(answer[name]) for name in named}
        return Generated(answer["ids"], footprint, answer["full_bytes"], answer["step_ms"][1:], **by_token)

    def close(self) -> None:
        """Nothing: the worker stays for the next press."""


class CpuPeer(CacheMethod):
    """OpenVINO or llama.cpp, with the same weights, in an environment of their own; `kv` is their cache's format.

    They decode behind a random context, for speed (`specache_bench.speed`), and answer no prompts.
    """

    formats: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "openvino": ("u8", "u4"),
        "llama.cpp": ("f16", "q8_0"),
    }

    @classmethod
    def check(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `CacheMethod`; the first format is the default."""
        known = cls.formats[name]
        check_options(f"Method {name!r}", options, {"kv": known[0]})
        if (kv := options.get("kv", known[0])) not in known:
            raise ConfigError(f"Method {name!r}: kv={kv}: choose one of {', '.join(known)}.")
        return {"kv": kv}

    def open(self, lab: Lab) -> Self:
        """Refuse prompts."""
        raise ConfigError(f"Method {self.name!r} is timed alone (specache-bench decode): leave it out here.")

    def start(self, folder: Path, dtype: str, batch: int, kv_len: int, room: int) -> WorkerProcess:
        """A worker that has read a context, with room for so many steps; a `ConfigError` if it does not start.

        `folder` has a Llama of transformers, in safetensors; its conversions are kept there.
        """
        numbers = map(str, (batch, kv_len, room, torch.get_num_threads()))
        arguments = [self.name, self.options["kv"], str(folder), dtype, *numbers]
        return WorkerProcess(CPU_PEERS, "cpu_worker.py", arguments)


class Roomy(CacheMethod):
    """transformers' own cache with memory ahead: no step copies what is there. The strongest of 16 bits on a GPU."""

    defaults: ClassVar[Mapping[str, Any]] = {"room": 256}

    def begin(self, model: PreTrainedModel, cache: Any) -> Any:
        """Put the prompt's keys and values into layers with room for so many tokens more, and again when it is full."""
        for layer_idx, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[layer_idx] = _RoomyLayer(layer, self.options["room"])
        return cache


class _RoomyLayer(DynamicLayer):
    def __init__(self, layer: DynamicLayer, room: int) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values, self._room = layer.keys, layer.values, room
        self._whole = [self.keys, self.values]

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._whole[0].shape[2]:
            more = (0, 0, 0, key_states.shape[2] + self._room)
            self._whole = [F.pad(side, more) for side in (self.keys, self.values)]
        for side, new in zip(self._whole, (key_states, value_states), strict=True):
            side[:, :, start:end] = new
        self.keys, self.values = (side[:, :, :end] for side in self._whole)
        return self.keys, self.values


OURS = ("specache", "kivi", "kcache")
METHODS: dict[str, type[CacheMethod]] = {
    "full": CacheMethod,
    "roomy": Roomy,
    "compiled": Compiled,
    **dict.fromkeys(OURS, Specache),
    "quantized": Quantized,
    **dict.fromkeys(PRESSES, Evicting),
    **dict.fromkeys(("openvino", "llama.cpp"), CpuPeer),
}
WITH_BITS = ("specache", "kivi", "quantized")


def make_method(method: Method) -> CacheMethod:
    """By its name and options; a `ConfigError` if it is unknown, or an option is, or a value is bad."""
    if method.name not in METHODS:
        raise ConfigError(f"There is no method {method.name!r}. Methods: {', '.join(METHODS)}.")
    return METHODS[method.name](method.name, dict(method.options))


def read_methods(spellings: Sequence[str], bits: Sequence[int]) -> list[Method]:
    """Methods as "specache,top_k=32" spells them, one for each of `bits` where it has a width and doesn't say which.

    Raises:
        ConfigError: If a method is unknown, an option is, or `bits` would be for nobody.
    """
    methods: list[Method] = []
    given = [Method.read(spelling) for spelling in spellings]
    widened = [one for one in given if bits and one.name in WITH_BITS and "bits" not in dict(one.options)]
    for one in given:
        methods += [one.having(bits=width) for width in bits] if one in widened else [one]
    if bits and not widened:
        raise ConfigError(
            f"--bits is for {', '.join(WITH_BITS)} without a width of their own: there is none."
        )
    for method in methods:
        make_method(method.having(bytes=1) if needs_budget(method) else method)
    if twice := {str(method) for method in methods if methods.count(method) > 1}:
        raise ConfigError(f"Method {', '.join(sorted(twice))} is given twice.")
    methods.sort(key=needs_budget)
    if needs_budget(methods[-1]) and not any(method.name == "specache" for method in methods):
        name = methods[-1].name
        raise ConfigError(
            f"{name} gets as many bytes as SpeCache takes: give --method specache too, or the bytes"
            f" ({name},bytes=400000) or the share to evict ({name},ratio=0.8)."
        )
    return methods


def needs_budget(method: Method) -> bool:
    """Whether it is a press that waits for the bytes of SpeCache."""
    return method.name in PRESSES and not {"bytes", "ratio"} & dict(method.options).keys()


def kv_tensors(cache: Any) -> list[torch.Tensor]:
    """Keys and values of all layers that have some."""
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold something: those inside containers and inside tensor subclasses (quanto's)."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from plain_tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from plain_tensors(inner)

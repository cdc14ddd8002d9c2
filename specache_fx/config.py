"""`SpecacheConfig`: every option of the backend, checked in one place."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from specache_fx._log import warn_once
from specache_fx.errors import ConfigError

_log = logging.getLogger(__name__)

PolicyName = Literal["specache", "kivi", "kcache"]
Lookahead = Literal["auto", "token", "query", "none"]
HostKind = Literal["auto", "pinned", "memory", "disk"]
Lowering = Literal["inductor", "eager"]
Aggregation = Literal["mean", "max"]
OnMiss = Literal["recover", "keep", "refetch"]
HitTracking = bool | Literal["steps"]

BITS = (1, 2, 4, 8, 16)
_MOST = 2**48  # a larger one is a mistake, and overflows where sizes are multiplied
_RENAMED = {"cuda_graphs": "replay"}  # options of earlier versions
_OF_POLICY: Any = None  # a default that the policy decides; no value of a config that is made
# By `bits`, `key_share` and `value_share` of `lookahead="auto"` where no bus is.
SHARES = {
    1: (2**-10, 2**-9),
    2: (2**-9, 2**-9),
    4: (2**-8, 2**-8),
    8: (2**-6, 2**-6),
    16: (2**-6, 2**-6),  # exact: no pair is read
}


@dataclass(frozen=True)
class Policy:
    """The place of KV pairs that have left the 16-bit window: data that passes and runtime read, never a code path.

    Attributes:
        codes: A low-bit copy of keys and values stays on the device. If not, the 16-bit keys do and no values: scores
            are exact, and a pair whose value is not fetched adds nothing to the output. Nothing is renormalised for it.
        host_keys: The 16-bit keys are kept on the host.
        host_values: The 16-bit values are.
        prefetch: Each decode step gets the host's part of a few pairs.
        bits: Valid widths of the device copy; the first is the default.
        lookaheads: Valid values of `lookahead`; the first is the default.
        quantizer: Makes the codes, unless an option says otherwise.
    """

    codes: bool
    host_keys: bool
    host_values: bool
    prefetch: bool
    bits: tuple[int, ...] = (2, 1, 4, 8, 16)
    lookaheads: tuple[Lookahead, ...] = get_args(Lookahead)
    quantizer: str = "turboquant"

    @property
    def offload(self) -> bool:
        """Whether there is anything on the host."""
        return self.host_keys or self.host_values

    def host_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Channels of a key and of a value that a row on the host has."""
        return key_dim * self.host_keys, value_dim * self.host_values


POLICIES: dict[str, Policy] = {
    "specache": Policy(codes=True, host_keys=True, host_values=True, prefetch=True),
    "kivi": Policy(codes=True, host_keys=False, host_values=False, prefetch=False, quantizer="kivi"),
    "kcache": Policy(
        codes=False, host_keys=False, host_values=True, prefetch=True, bits=(16,), lookaheads=("none",)
    ),
}


@dataclass(frozen=True)
class SpecacheConfig:
    """The options of `torch.compile(model, backend="specache", options={...})`.

    Attributes:
        policy: "specache" keeps the 16-bit KV pairs on the host and prefetches; "kivi" keeps the low-bit copy alone;
            "kcache" keeps exact keys on the device and values on the host, and fetches the `top_k` values that
            weigh most in the same step. Other values, except the window's, count as 0.
        bits: Width of the device copy's codes: 1, 2 (the default), 4, 8, or 16 (the exact pairs). "kcache" has no
            codes: it is 16 there, and nothing else is valid.
        group_size: Tokens (keys) or channels (values) that share one scale and zero.
        residual_length: Newest tokens that stay at 16 bits on the device; up to `group_size - 1` more while a
            group fills.
        top_k: KV pairs (values, with "kcache") that are prefetched for each batch row and kv head.
        resident_layers: The first attention layers that keep all tokens (not a window) stay whole at 16 bits on the
            device: nothing of them is quantised, offloaded or selected. Where a graph break splits a model, each
            part's first layers. Where that is all of them, a warning says so. KCache's L.
        sink_tokens: The first tokens of each sequence, after its padding, that stay at 16 bits on the device besides
            the window (StreamingLLM's attention sinks). Not with "kcache".
        lookahead: Chooses the pairs. "auto" (the default) hides a bus where there is one: it is "token" on a GPU, and
            with `host="disk"`. On a CPU host and device are one memory. There it is "none", with a `key_share` and a
            `value_share` by `bits`. Options that speak of a speculative token (`on_miss`, `accept_guesses`) make it
            "token" too. "token" decodes a speculative token beside the output token (SpeCache); "query" uses the
            output token's own scores, one step late; "none" selects and fetches in the same step, as "kcache" always
            does.
        key_share: A pair that may have a larger share of the output token's attention is read at 16 bits in the same
            step, from where it lies on the host. Its share by its code decides, times e to the standard deviation of
            its score's error. Its key gives the score. Beside
            `lookahead="none"` this is the selection, in place of `top_k`; beside the others it corrects theirs. None:
            no pair is read so. Of a group of heads the share is what `aggregation` says. Not with 16 bits, whose codes
            are exact.
        value_share: Of these pairs, one with a larger share by the exact keys has its value read too. None: as
            `key_share`. On a GPU, whose bus brings whole rows, all have: it is 0 there. There a step reads
            `2 / key_share` pairs a kv head at most, those with the largest shares.
        on_miss: The action after a wrong speculative token. "recover" (the default): the scores of
            both tokens choose the next pairs, and the token that followed the last occurrence of the newest n-gram
            replaces the speculative one. "keep": the speculative lane goes on from its own token, and its scores alone
            choose (the paper's Algorithm 3). "refetch": pairs are chosen and fetched anew for the right token, in one
            more pass before the step. Without a speculative token (another lookahead) no token is missed.
        accept_guesses: After a right speculative token, return its lane's outputs and run no step for it. With 16 bits
            that changes logits by rounding alone. At fewer, that token attends to the pairs that were prefetched for
            the token before it. The guesses are those of `on_miss="recover"`. In a batch, all rows have to be guessed
            right. Don't write to `weight.data` between two tokens: that does not show.
        aggregation: How the selection scores of the query heads that share a kv head become one: "mean" or "max".
        quantizer: Name of a quantiser in `specache_fx.runtime.quant.QUANTIZERS`: "turboquant" by default, the paper's
            "kivi" with policy "kivi". With 16 bits there are no codes, and it says nothing.
        host: Where the 16-bit pairs live: "pinned" (CUDA), "memory", "disk" (a memory-mapped file), or "auto":
            "pinned" or "memory", or "disk" with a warning where there is too little memory for the prompt's.
        host_dir: Folder for the file; by default the system's temporary folder, or `/var/tmp` where that is in memory.
            The file is never left behind.
        reserve: Tokens for which device and host have room from the prompt on: nothing is moved or allocated until a
            sequence is longer. 0 (the default) lets memory grow with the tokens. Windows grow all the same.
        kernel: "auto", or the name of a kernel in `specache_fx.runtime.kernels.KERNELS`: an error where that one can't
            compute a layer of the model.
        lowering: "inductor" compiles the decode step, the tests of a prompt's masks, prompts whose attention is spelt
            out, and graphs that are left alone; "eager" compiles nothing.
        compile_prefill: Have Inductor compile all prompts and further turns. They are a little faster then: 7.1 s and
            not 7.5 for 4,096 tokens of SmolLM2's shape. Each new kind of them compiles first, half a minute there.
        replay: True (the default) captures the decode step and replays it; False never does. On the CPU it is a list
            of C++ calls, where Inductor made the graph and each layer's step is C++. On a GPU it is a CUDA graph: steps
            in which a group fills, a mask moves or something is traced run launch by launch in between. So do all steps
            of latent attention, of layers that attentions share, and with `host="disk"`. Where Triton's kernels don't
            run all of a step, it is captured once half of the memory that is reserved for tokens is used.
        strict: Raise where an attention can't be rewritten, instead of leaving it alone with a warning; also where
            `lookahead="token"` is not possible.
        skip_passes: Names of passes that are left out, to measure or to suspect one: those of `passes/pipeline.py` that
            change no answer.
        track_hit_rates: Measure `topk_hit_rate` and `attention_hit_rate` (one more top-k a layer and step, without a
            sort); "steps" keeps them for each step too (`SessionStats.hit_series`, 48 bytes a step).

    Raises:
        ConfigError: On a value outside its range or a contradiction; also a `ValueError`.
    """

    policy: PolicyName = "specache"
    bits: int = _OF_POLICY
    group_size: int = 64
    residual_length: int = 64
    top_k: int = 64
    resident_layers: int = 0
    sink_tokens: int = 0
    lookahead: Lookahead = _OF_POLICY
    key_share: float | None = None
    value_share: float | None = None
    on_miss: OnMiss = "recover"
    accept_guesses: bool = False
    aggregation: Aggregation = "mean"
    quantizer: str = _OF_POLICY
    host: HostKind = "auto"
    host_dir: str | None = None
    reserve: int = 0
    kernel: str = "auto"
    lowering: Lowering = "inductor"
    compile_prefill: bool = False
    replay: bool = True
    strict: bool = False
    skip_passes: tuple[str, ...] = ()
    track_hit_rates: HitTracking = True

    def __post_init__(self) -> None:
        self._one_of("policy", tuple(POLICIES))
        for name, all_valid, valid in (
            ("bits", BITS, self.placement.bits),
            ("lookahead", get_args(Lookahead), self.placement.lookaheads),
        ):
            self._default(name, valid[0])
            self._one_of(name, all_valid)
            if getattr(self, name) not in valid:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} contradicts policy={self.policy!r}, which has"
                    f" {' or '.join(map(repr, valid))} alone: leave {name} out, or choose another policy."
                )
        self._default("quantizer", self.placement.quantizer)
        asks_for_guesses = self.on_miss != "recover" or self.accept_guesses
        if self.lookahead == "auto" and (asks_for_guesses or self.host == "disk"):
            object.__setattr__(self, "lookahead", "token")
        kinds = {"on_miss": OnMiss, "aggregation": Aggregation, "host": HostKind, "lowering": Lowering}
        for name, kind in kinds.items():
            self._one_of(name, get_args(kind))
        for name in ("group_size", "top_k"):
            self._integer(name, 1)
        for name in ("residual_length", "resident_layers", "sink_tokens", "reserve"):
            self._integer(name, 0)
        if self.sink_tokens and not self.placement.codes:
            raise ConfigError(
                f"sink_tokens={self.sink_tokens} contradicts policy={self.policy!r}: its keys are exact for all tokens,"
                " and the values of the first ones are fetched where they weigh most. Leave sink_tokens out."
            )
        self._check_shares()
        for name in ("strict", "compile_prefill", "accept_guesses", "replay"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False.")
        if self.compile_prefill and self.lowering == "eager":
            raise ConfigError('compile_prefill=True contradicts lowering="eager": leave one of them out.')
        names: Any = self.skip_passes
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"skip_passes={names!r}: give a list of names.")
        object.__setattr__(self, "skip_passes", tuple(names))
        tracks: Any = self.track_hit_rates
        if not isinstance(tracks, bool) and not (isinstance(tracks, str) and tracks == "steps"):
            raise ConfigError(f'track_hit_rates={self.track_hit_rates!r}: give True, False or "steps".')
        for name in ("quantizer", "kernel"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give a name (a string).")
        self._check_guesses()
        if self.host_dir is not None:
            if not isinstance(self.host_dir, (str, Path)):
                raise ConfigError(f"host_dir={self.host_dir!r}: give the path of a folder.")
            object.__setattr__(self, "host_dir", str(self.host_dir))
            if self.host not in ("auto", "disk"):
                raise ConfigError(
                    f'host_dir is given, but host={self.host!r}: host_dir goes with host="disk" or "auto".'
                )

    def _default(self, name: str, value: Any) -> None:
        """Set an option that was not given to the policy's value."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _one_of(self, name: str, valid: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        # An array compares element by element, and True is 1.
        if isinstance(value, bool) or not isinstance(value, (int, str)) or value not in valid:
            raise ConfigError(f"{name}={value!r} is not valid: choose one of {', '.join(map(repr, valid))}.")

    def _integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r} is not valid: give a whole number >= {least}.")
        if value > _MOST:
            raise ConfigError(f"{name}={value} is not valid: give a whole number of at most {_MOST:,}.")

    def _check_guesses(self) -> None:
        if self.on_miss == "refetch" and self.num_lanes == 1:
            speculates = (
                f"lookahead={self.lookahead!r}" if self.placement.prefetch else f"policy={self.policy!r}"
            )
            raise ConfigError(
                f'on_miss="refetch" is given, but {speculates} speculates on no token, so none is missed: leave'
                ' on_miss out, or use policy="specache" with lookahead="token".'
            )
        if self.accept_guesses and (self.num_lanes == 1 or self.on_miss != "recover"):
            raise ConfigError(
                'accept_guesses=True needs a speculative token, and the guesses of on_miss="recover". It goes with'
                ' policy="specache" and lookahead="token". Leave it out, or the contradicting option.'
            )

    def _check_shares(self) -> None:
        for name in ("key_share", "value_share"):
            share = getattr(self, name)
            if share is None:
                continue
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
                raise ConfigError(f"{name}={share!r} is not valid: give a share of attention, from 0 to 1.")
            object.__setattr__(self, name, float(share))
            if not self.placement.host_keys:
                raise ConfigError(
                    f"{name}={share} contradicts policy={self.policy!r}, which has no 16-bit pairs on the host: leave"
                    f' {name} out, or use policy="specache".'
                )
        if self.value_share is None:
            object.__setattr__(self, "value_share", self.key_share)
        if self.value_share is not None and self.key_share is None:
            raise ConfigError(
                f"value_share={self.value_share} is a share of the pairs that key_share chooses: give key_share too."
            )

    def for_device(self, kind: str) -> SpecacheConfig:
        """These options with `lookahead="auto"` decided, for a model on a device of that kind (`device.type`)."""
        if kind != "cpu":
            value_share = None if self.key_share is None else 0.0
            lookahead: Lookahead = "token" if self.lookahead == "auto" else self.lookahead
            return replace(self, lookahead=lookahead, value_share=value_share)
        if self.lookahead != "auto":
            return self
        if not self.placement.host_keys:
            return replace(self, lookahead="none")
        if self.top_k != type(self).top_k:
            warn_once(
                _log,
                f"specache: top_k={self.top_k} says nothing here: on a CPU pairs are read by their share of attention"
                ' (key_share, value_share). Give lookahead="none" to choose the top_k, or "token" to speculate.',
            )
        shares = SHARES[self.bits] if self.key_share is None else (self.key_share, self.value_share)
        return replace(self, lookahead="none", key_share=shares[0], value_share=shares[1])

    @property
    def selection(self) -> str:
        """The pairs that a decode step attends to at 16 bits, besides the window, in a sentence."""
        if not self.placement.prefetch:
            return "none"
        if self.bits == 16 and self.placement.codes:
            return "all"
        chosen = {
            "auto": "as lookahead says on the device",
            "token": f"{self.top_k} a kv head, prefetched for a speculative token",
            "query": f"{self.top_k} a kv head, prefetched by the scores of the token before",
            "none": f"{self.top_k} a kv head, fetched in the same step",
        }[self.lookahead]
        if self.key_share is None:
            return chosen
        shares = (
            f"those that may have {self.key_share:.2g} of the attention, read in the same step (values:"
            f" {self.value_share:.2g})"
        )
        return shares if not self.stages else f"{chosen}; and {shares}"

    @property
    def corrects(self) -> bool:
        """Whether pairs are read from the host in the step that needs them."""
        return self.key_share is not None and self.bits != 16

    @property
    def cpu_reads(self) -> bool:
        """Whether the CPU alone can read these: values are chosen apart from keys, or they are in a file."""
        return self.corrects and (bool(self.value_share) or self.host in ("disk", "memory"))

    @property
    def stages(self) -> bool:
        """Whether pairs are brought to slots on the device: for the next step, or for the `top_k` of this one."""
        return self.placement.prefetch and not (self.lookahead == "none" and self.key_share is not None)

    @property
    def placement(self) -> Policy:
        """The policy's data."""
        return POLICIES[self.policy]

    @property
    def num_lanes(self) -> int:
        """Lanes that the decode graph should have: 2 with a speculative token, else 1."""
        return 2 if self.stages and self.lookahead == "token" else 1

    def num_quantized(self, kv_len: int) -> int:
        """The number of oldest tokens that are quantised when the cache holds `kv_len` tokens.

        A function of the length alone, so that prefill, appending and cropping agree (`docs/laws.md`, residual
        window).
        """
        return max(0, (kv_len - self.residual_length) // self.group_size) * self.group_size

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | SpecacheConfig | None) -> SpecacheConfig:
        """Build a config from the `options` of `torch.compile`.

        Raises:
            ConfigError: If an option is unknown; the message lists the valid ones.
        """
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(f"options={options!r}: give a dict of options, such as {{'bits': 1}}.")
        valid = [each.name for each in fields(cls)]
        unknown = [name for name in options if name not in valid]
        if unknown:
            name = str(unknown[0])
            close = _RENAMED.get(name) or next(iter(difflib.get_close_matches(name, valid, n=1)), None)
            hint = f" Did you mean {close!r}?" if close else ""
            if name in ("prompts", "warm"):
                hint = f" That is an argument of specache_fx.compile(model, {name}=...)."
            raise ConfigError(
                f"Unknown option{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}.{hint}"
                f" Valid options: {', '.join(valid)}."
            )
        return cls(**options)

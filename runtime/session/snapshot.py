"""A session's content as named tensors: taken from one session, put into another, nothing computed anew.

A saved cache and a fork are made so. Both go on as the session that they are of.

Names are `mask`, `tokens`, `speculative`, `guessed`, and for layer i `i.NAME`: `NAME` is of `LayerState.snapshot`,
`host.N` (rows on the host, block by block), or `staged` (tokens in the slots).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.session.session import Session

# Options that decide the content of a cache of some length, and options that decide guess and staged pairs.
HELD_OPTIONS = (
    "policy",
    "bits",
    "group_size",
    "residual_length",
    "resident_layers",
    "sink_tokens",
    "quantizer",
)
_SIZE = range(1 << 31)
_SPARE_TOKENS = 1024  # more than memory grows by at once
HEADER_FORM = {
    "config": dict,
    "shapes": [
        {"num_kv_heads": _SIZE, "key_dim": _SIZE, "value_dim": _SIZE, "window": (range(1, 1 << 31), None)}
    ],
    "dtype": frozenset({"float64", "float32", "float16", "bfloat16"}),
    "batch": _SIZE,
    "kv_len": _SIZE,
    "staged": bool,
    "masks_move": bool,
}
"""The `SessionHeader.to_json` of a session (`specache_fx/saved/json_form.py`)."""
LOOKAHEAD_OPTIONS = "top_k", "lookahead", "on_miss", "aggregation"


@dataclass(frozen=True)
class SessionHeader:
    """A session's data besides its tensors; plain data.

    Attributes:
        config: The options.
        shapes: One per layer.
        dtype: Name of the dtype of keys and values, such as `bfloat16`.
        batch: Sequences.
        kv_len: Tokens held.
        staged: The staged pairs are those of the next token.
        masks_move: See `Session`.
    """

    config: SpecacheConfig
    shapes: tuple[LayerShape, ...]
    dtype: str
    batch: int
    kv_len: int
    staged: bool
    masks_move: bool

    @classmethod
    def of(cls, session: Session) -> SessionHeader:
        """Of a session that has tokens."""
        assert session.batch is not None
        dtype, staged = str(session.dtype).removeprefix("torch."), session.staged_for == session.kv_len
        held = session.batch, session.kv_len, staged, session.masks_move
        return cls(session.config, session.shapes, dtype, *held)

    def to_json(self) -> dict[str, object]:
        """As values that JSON has."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "config": asdict(self.config),
            "shapes": [shape._asdict() for shape in self.shapes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> SessionHeader:
        """Build the header from the result of `to_json`.

        Raises:
            ConfigError: If the options are none of this version.
            KeyError: If something is missing.
            TypeError: If something is missing or has no place.
        """
        held: dict[str, Any] = dict(data)
        held["config"] = SpecacheConfig.from_options(held["config"])
        held["shapes"] = tuple(LayerShape(**shape) for shape in held["shapes"])
        return cls(**held)


def snapshot(session: Session) -> dict[str, torch.Tensor]:
    """A session's tensors, by name: views. Hold the session's lock as long as they are read.

    `Session.next_answer` is dropped. The saved session and the living one both compute the next step.
    """
    session.settle()
    session.next_answer = None
    found = {
        "mask": session.key_mask.real,
        "tokens": session.tokens.held if session.tokens.held.numel() else None,
        "speculative": session.speculative_token,
        "guessed": session.guessed_token,
    }
    held = {name: tensor for name, tensor in found.items() if tensor is not None}
    for i, layer in enumerate(session.layers):
        held |= {f"{i}.{name}": tensor for name, tensor in layer.snapshot().items()}
        if session.host is not None and i in session.tiered:
            held |= {f"{i}.host.{n}": part for n, part in enumerate(session.host.parts(i))}
        if session.transfer is not None and i in session.tiered and session.staged_for == session.kv_len:
            held[f"{i}.staged"] = session.transfer.wait(i)[1]
    return held


def restore(session: Session, header: SessionHeader, held: Mapping[str, torch.Tensor]) -> None:
    """Fill a new session with another one's `snapshot`.

    Its options in `HELD_OPTIONS` are those of `header`. Where others of `LOOKAHEAD_OPTIONS` differ, or no pairs were
    staged, lookahead starts over. Counts (`stats`) start at zero.

    Args:
        session: It has no tokens. After an error it is to be closed.
        header: Of the session that was saved.
        held: By name, on any device; read once, layer by layer.

    Raises:
        HostMemoryError: If the host tier can't take the rows.
        KeyError: If a tensor is missing.
        ValueError: If one has another shape or dtype than such a session has.
    """
    device = session.device
    for name, width in (
        ("mask", header.kv_len),
        ("tokens", header.kv_len),
        ("speculative", 1),
        ("guessed", 1),
    ):
        if name in held and (held[name].shape[0] != header.batch or held[name][0].numel() > width):
            raise ValueError(
                f"{name} is {tuple(held[name].shape)}: of {header.batch} x {header.kv_len} tokens"
            )
    session._open(header.batch, header.kv_len)
    if "mask" in held:
        session.key_mask.put(held["mask"].to(device, copy=True))
    if "tokens" in held:
        session.tokens.append(held["tokens"].to(device), 0)
    for i, layer in enumerate(session.layers):
        mine = {name.partition(".")[2]: held[name] for name in held if name.startswith(f"{i}.")}
        mine.pop("staged", None)
        parts = [mine.pop(f"host.{n}") for n in range(sum(name.startswith("host.") for name in mine))]
        _check_sizes(session, i, mine["sizes"].tolist(), header)
        layer.restore(mine)
        if i in session.tiered:
            _restore_rows(session, i, parts, held)
    if session.stored_length() != header.kv_len:
        raise ValueError(f"its layers have {session.stored_length()} tokens, and not {header.kv_len}")
    session.kv_len, session.masks_move = header.kv_len, header.masks_move
    if header.staged and all(
        getattr(session.config, name) == getattr(header.config, name) for name in LOOKAHEAD_OPTIONS
    ):
        _look_ahead(session, held)


def _check_sizes(session: Session, layer: int, sizes: list[int], header: SessionHeader) -> None:
    """Make sure that a layer's tokens have room in its arena, not much more, and that whole groups are quantised.

    Raises:
        ValueError: If not.
    """
    window, group_size = session.shapes[layer].window, session.config.group_size
    config = header.config
    enough = 2 * (header.kv_len + config.reserve + config.residual_length + group_size) + _SPARE_TOKENS
    if window is not None:
        room, filled, kv_len = sizes
        fits = 0 <= min(kv_len, window - 1) <= filled <= room <= enough + 2 * window
    else:
        groups, room, quantized, filled = sizes
        most = groups * group_size if layer in session.tiered else 0
        fits = (
            0 <= quantized <= most <= enough and quantized % group_size == 0 and 0 <= filled <= room <= enough
        )
    if not fits:
        raise ValueError(f"layer {layer} can't have sizes {sizes}")


def _restore_rows(
    session: Session, layer: int, parts: list[torch.Tensor], held: Mapping[str, torch.Tensor]
) -> None:
    """Fill a layer's host tier, and check that it has all rows that will be asked for."""
    num_quantized = session.tiered[layer].num_quantized
    if session.host is not None:
        session.host.fill(layer, parts)
        if (length := session.host.length(layer)) != num_quantized:
            raise ValueError(f"layer {layer} has {length} of {num_quantized} rows on the host")
    for name in ("sink_tokens", "staged"):
        if (tokens := held.get(f"{layer}.{name}")) is not None and tokens.numel():
            _check_tokens(tokens, num_quantized, f"{name} of layer {layer}")


def _check_tokens(tokens: torch.Tensor, num_quantized: int, name: str) -> None:
    """Kernels read the rows of these without asking."""
    if int(tokens.min()) < -1 or int(tokens.max()) >= num_quantized:
        raise ValueError(f"{name} names tokens that are not quantised")


class _Rows(Mapping[str, torch.Tensor]):
    """A snapshot's tensors with other batch rows, each copied when it is read: a layer's at a time."""

    def __init__(self, held: Mapping[str, torch.Tensor], rows: Sequence[int]) -> None:
        self._held, self._rows = held, torch.tensor(rows)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._held[name]
        return tensor if name.endswith(".sizes") else tensor.index_select(0, self._rows.to(tensor.device))

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def fork(source: Session, rows: Sequence[int]) -> Session:
    """A session of its own with batch rows `rows` of another, which is held and has no step that failed midway.

    Each row goes on as it would in `source`, which forgets `Session.next_answer` as with `snapshot`.

    Raises:
        HostMemoryError: If the host tier can't take a copy.
    """
    held: Mapping[str, torch.Tensor] = snapshot(source)
    if list(rows) != list(range(source.batch or 0)):
        held = _Rows(held, rows)
    twin = Session(source.config, source.shapes, source.dtype, source.device)
    try:
        restore(twin, replace(SessionHeader.of(source), batch=len(rows)), held)
    except BaseException:
        twin.close()
        raise
    twin.origin, twin.forms = source.origin.copy(), [*source.forms]
    return twin


def _look_ahead(session: Session, held: Mapping[str, torch.Tensor]) -> None:
    """Stage the pairs that were staged, from the host's rows: they are the same to the bit."""
    if session.transfer is not None:
        for i in session.tiered:
            session.transfer.prefetch(i, held[f"{i}.staged"].to(session.device))
    for name, token in (("speculative", "speculative_token"), ("guessed", "guessed_token")):
        if name in held:
            setattr(session, token, held[name].to(session.device, copy=True))
    session.staged_for = session.kv_len

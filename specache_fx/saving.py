"""`save` and `load`: a KV cache in a file, to go on with in another process without reading its tokens again."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specache_fx.api import NO_CACHE
from specache_fx.backend import Backend
from specache_fx.cache_tree import describe, rebuild
from specache_fx.compiled import backend_of
from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError, ConfigError, SavedCacheError
from specache_fx.fingerprint import config_digest, config_of, matched, token_hash, weight_digest
from specache_fx.runners import inference, with_tokens_first
from specache_fx.runtime import registry
from specache_fx.runtime.handle_tensor import Handle, plain
from specache_fx.runtime.parts import Part, parts_of
from specache_fx.runtime.session import Session
from specache_fx.runtime.snapshot import HELD_OPTIONS, SessionHead, restore, snapshot
from specache_fx.tensor_file import TensorFile, opened, write

FILE = "cache.safetensors"
FORMAT = 1  # counts up when older versions can't read what is written, or newer ones what was


def save(past_key_values: Any, folder: str | Path, *, input_ids: torch.Tensor | None = None) -> None:
    """Save a KV cache, so that `load` restores it in another process.

    One file, `cache.safetensors`, holds codes, windows, host rows, padding and lookahead as they are. It takes the
    place of an older one when it is whole; until then, and after an error, the older one stays. Nothing is pickled. The
    file is readable by its owner alone: whoever has it can tell what the text was. A step that another thread runs on
    this cache is waited for, and steps wait until it is saved.

    Args:
        past_key_values: As for `stats`; all of its tensors, at the length that they have. Besides these it may hold
            other tensors (a layer that is left alone), numbers and strings.
        folder: Made if need be; what else is in there stays.
        input_ids: The tokens that the cache is of, integers `[batch, tokens]`: `load` can compare a hash of them.

    Raises:
        CacheHandleError: If there is no cache of this backend in it, a part of one alone, or a released one.
        SavedCacheError: If the file can't be written, something in the cache can't be, the model is gone, or
            `input_ids` are not as many tokens as the cache has.
    """
    with content(past_key_values, input_ids) as (about, tensors):
        write_to(Path(folder) / FILE, about, tensors)


def write_to(path: Path, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what `content` gave to a file, whose folder is made if need be.

    Raises:
        SavedCacheError: If it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, tensors, about)
    except OSError as error:
        raise SavedCacheError(
            f"The cache can't be saved in {str(path.parent)!r}: {error.strerror or error}. Give a folder that can be"
            f" written to, on a disk with room for {sum(tensor.nbytes for tensor in tensors.values()):,} bytes."
        ) from error


@contextlib.contextmanager
def content(
    past_key_values: Any, input_ids: torch.Tensor | None
) -> Iterator[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """What a saved cache is made of, JSON and tensors; the cache stands still within. Raises as `save`."""
    with inference(), contextlib.ExitStack() as held:
        seen: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> int:
            seen.append(tensor)
            return len(seen) - 1

        told = describe(past_key_values, note)
        parts = held.enter_context(parts_of(seen))
        if not parts:
            raise CacheHandleError(NO_CACHE.format(function="save"))
        ours = {place for part in parts for place in part.places}
        tensors = {f"plain.{i}": plain(tensor) for i, tensor in enumerate(seen) if i not in ours}
        for i, part in enumerate(parts):
            tensors |= {f"{i}.{name}": tensor for name, tensor in snapshot(part.session).items()}
        about = {
            "format": FORMAT,
            "tokens": None if input_ids is None else _hash(parts[0].session, input_ids),
            "sessions": [_about(part) for part in parts],
            "cache": told,
        }
        yield about, tensors


def _about(part: Part) -> dict[str, Any]:
    weights = {name: weight() for name, weight in part.session.weights.items()}
    gone = [name for name, weight in weights.items() if weight is None]
    if gone:
        raise SavedCacheError(
            f"The model that this cache is of is gone (its weight {gone[0]!r}), and a saved cache names its model by"
            " its weights. Save the cache while the model is there."
        )
    return {
        **SessionHead.of(part.session).to_json(),
        "places": part.places,
        "swapped": part.swapped,
        "model_config": config_digest(part.session.model_config),
        "weights": {name: weight_digest(weight) for name, weight in weights.items() if weight is not None},
    }


def _hash(session: Session, input_ids: torch.Tensor) -> str:
    expected = session.batch, session.kv_len
    if tuple(input_ids.shape) != expected:
        raise SavedCacheError(
            f"input_ids are {tuple(input_ids.shape)}, but the cache is of {expected} tokens. Give the tokens that it"
            " holds: generate() returns one more than it has put into its cache."
        )
    return token_hash(input_ids)


def load(model: nn.Module, folder: str | Path, *, input_ids: torch.Tensor | None = None) -> Any:
    """Restore a KV cache that `save` wrote, in this process or another. Nothing is computed anew.

    `model` goes on with it as with the one that was saved: the tokens to come are the same, and so are the bytes on the
    device. It has the weights that the cache was made with, and the same `policy`, `bits`, `group_size`,
    `residual_length`, `resident_layers`, `sink_tokens` and `quantizer`. Other options are the model's own. Where
    `top_k`, `lookahead`, `on_miss`, `aggregation` or `selector` differ, what was speculated is dropped. The options of
    a function that was compiled around the model can't be seen; those that were saved are taken then.

    Args:
        model: Compiled with this backend (`specache_fx.compile`), on the device where the cache is to be.
        folder: As for `save`.
        input_ids: The tokens that the cache should begin the prompt with, integers `[batch, tokens]`. If given, the
            first ones have to be those that were saved with it.

    Returns:
        What was given to `save`: a cache for `model.generate(ids, past_key_values=...)`, `ids` with all tokens.

    Raises:
        HostMemoryError: If the host tier can't take it.
        SavedCacheError: If there is none, it is damaged or cut short, another version's, another model's, of other
            options or of other tokens. Nothing is left behind.
    """
    with opened(Path(folder) / FILE) as file:
        reason = misfit(model, file, input_ids)
        if reason is not None:
            raise SavedCacheError(f"The cache in {str(folder)!r} is not loaded: {reason}")
        return restored(model, file)


def misfit(model: nn.Module, file: TensorFile, input_ids: torch.Tensor | None = None) -> str | None:
    """Say why a saved cache is none for a model, with the remedy; None where it is one."""
    if file.about["format"] != FORMAT:
        return f"its format is {file.about['format']}, this version reads {FORMAT}. Save it again with this version."
    kept = file.about["tokens"]
    batch, kv_len = (file.about["sessions"][0][name] for name in ("batch", "kv_len"))
    if input_ids is not None and kept is None:
        return "it was saved without input_ids, so its tokens can't be compared. Save it with them, or load without."
    if input_ids is not None and token_hash(input_ids[:, :kv_len]) != kept:
        return (
            f"its {batch} x {kv_len} tokens are not the first of input_ids. Read this prompt from its start."
        )
    options = options_of(model)
    for about in file.about["sessions"]:
        saved = SpecacheConfig.from_options(about["config"])
        for name in HELD_OPTIONS:
            mine, theirs = (None if each is None else getattr(each, name) for each in (options, saved))
            if options is not None and mine != theirs:
                return f"it has {name}={theirs!r}, the model {mine!r}. Compile the model with the option of the cache."
        if about["model_config"] is not None and config_of(model, about["model_config"]) is None:
            return "it is of a model with another config. Load it with the model that made it."
        weights = matched(model, about["weights"])
        if isinstance(weights, str):
            return f"it is another model's: this one {weights}. Load it with the model that made it."
    return None


def restored(model: nn.Module, file: TensorFile, kv_len: int | None = None) -> Any:
    """The cache of a file that is no misfit, or of its first `kv_len` tokens (`cuts`). Raises as `load`."""
    made: list[Session] = []
    tensors: dict[int, torch.Tensor] = {}
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    try:
        with inference():
            for i, about in enumerate(file.about["sessions"]):
                session = _session(model, file, i, about, made)
                session.rewind(session.kv_len if kv_len is None else kv_len)
                for place, swap, handle in zip(
                    about["places"], about["swapped"], registry.issue(session), strict=True
                ):
                    tensors[place] = (
                        with_tokens_first(handle) if swap and isinstance(handle, Handle) else handle
                    )
            for name in file.names:
                kind, _, number = name.partition(".")
                if kind == "plain":
                    tensors[int(number)] = file.read(name).to(device, copy=True)
            return rebuild(file.about["cache"], tensors.__getitem__, device)
    except BaseException as error:
        for session in made:
            session.close()
        if isinstance(error, (KeyError, TypeError, ValueError)) and not isinstance(error, ConfigError):
            raise SavedCacheError(
                f"{file.path} doesn't hold what a cache of this version has: {error}."
            ) from error
        raise


def cuts(file: TensorFile) -> bool:
    """Whether a saved cache can be restored to fewer tokens, as exactly as if no more had been read.

    The host has the 16-bit pairs that return to the window, and nothing but the handles knows of the length.
    """
    sessions = [SpecacheConfig.from_options(about["config"]) for about in file.about["sessions"]]
    return all(config.placement.offload for config in sessions) and not _has_number(file.about["cache"])


def _has_number(told: Any) -> bool:
    """Whether what `describe` gave has a number, which may count tokens, or a tensor that is no handle."""
    if isinstance(told, dict):
        return "tensor" not in told and any(map(_has_number, told.values()))
    if isinstance(told, list):
        return any(map(_has_number, told))
    return isinstance(told, (int, float)) and not isinstance(told, bool)


def _session(
    model: nn.Module, file: TensorFile, number: int, about: Mapping[str, Any], made: list[Session]
) -> Session:
    """One session of a file; it is put into `made` before it is filled."""
    others = "places", "swapped", "model_config", "weights"
    head = SessionHead.from_json({name: value for name, value in about.items() if name not in others})
    weights = matched(model, about["weights"])
    assert not isinstance(weights, str)
    device = next((weight.device for weight in weights.values()), torch.device("cpu"))
    config, dtype = options_of(model) or head.config, getattr(torch, head.dtype)
    session = registry.open_session(config, head.shapes, dtype, device)
    made.append(session)
    session.weights = {name: weakref.ref(weight) for name, weight in weights.items()}
    session.model_config = config_of(model, about["model_config"])
    front = f"{number}."
    restore(session, head, {n.removeprefix(front): file.read(n) for n in file.names if n.startswith(front)})
    return session


def options_of(model: nn.Module) -> SpecacheConfig | None:
    """The options that a module, or one inside, was compiled with by this backend; None where that can't be seen."""
    for module in model.modules():
        context = getattr(module, "dynamo_ctx", None)
        call = getattr(module, "_compiled_call_impl", None)
        if context is None and inspect.isfunction(call):
            context = inspect.getclosurevars(call).nonlocals.get("self")
        backend = backend_of(context)
        if isinstance(getattr(backend, "compiler_fn", None), Backend):
            return SpecacheConfig.from_options(backend.kwargs.get("options"))
    return None

"""Fingerprints: of tensors, of the weights that a cache was made with, and of token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from specache_fx.capture.graph.subclasses import flatten
from specache_fx.direct.traced_values import Values, differing, is_silent, tensor_of
from specache_fx.errors import ConfigError
from specache_fx.runtime.native import graph_ops

_ROW = 1024  # words of 8 bytes that one sum is of
_SAMPLE = 512  # elements of a weight that are compared each time, at least where it has so many
_PIECE = 8192  # rows at a time, 64 MiB: bounds the extra memory on a device


def _factors() -> torch.Tensor:
    """A word's factor depends on its place (splitmix64). Odd ones: a row in which one word changed has another sum."""
    mixed = np.arange(1, _ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))


_FACTORS = _factors()

# Digests so far, with the memory and the version of each weight.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def digest(tensor: torch.Tensor) -> str:
    """32 hex digits that depend on every byte of a tensor, its shape and its dtype.

    As fast as memory is read: 64-bit sums of the words times factors, and a cryptographic hash of these. It detects any
    fine-tuned weight and any damage; it is no proof against somebody who looks for a collision.

    Args:
        tensor: Of any shape, dtype and device. A subclass counts as the tensors in it.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for plain in flatten([tensor]):
        hashed.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        data = plain.detach().contiguous().reshape(-1).view(torch.uint8)
        rows, rest = divmod(data.numel(), 8 * _ROW)
        whole, tail = data[: data.numel() - rest], data[data.numel() - rest :]
        if whole.data_ptr() % 8:
            whole = whole.clone()
        for piece in whole.view(torch.int64).view(rows, _ROW).split(_PIECE) if rows else ():
            hashed.update(_sums(piece).cpu().numpy().data)
        hashed.update(tail.cpu().numpy().data)
    return hashed.hexdigest()


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Of each row of int64 `[rows, _ROW]` one sum, modulo 2^64."""
    factors = _FACTORS.to(words.device)
    if words.device.type == "cpu":
        return words @ factors if graph_ops.load() is None else torch.ops.specache.row_sums(words, factors)
    return (words * factors).sum(1)  # CUDA has no product of integers


def weight_digest(weight: torch.Tensor) -> str:
    """`digest` of a weight, computed once as long as its memory, its version and a sample of it are the same.

    Writes through `weight.data` count no version: an adapter that is merged shows in the sample. A few elements that
    are so written may not show in it; see `clear_digests`.
    """
    if weight.is_inference():
        return digest(weight)
    where = weight.data_ptr() if type(weight) in (torch.Tensor, nn.Parameter) else None
    state = where, weight._version, _sample(weight)
    held = _known.get(weight)
    if held is None or held[0] != state:
        held = _known[weight] = state, digest(weight)
    found: str = held[1]
    return found


def _sample(weight: torch.Tensor) -> tuple[bytes, ...]:
    """Some hundred elements spread over a weight."""
    taken = []
    for plain in flatten([weight]):
        flat = plain.detach().flatten()
        spread = flat[:: flat.numel() // _SAMPLE | 1]  # an odd step meets all columns of a matrix
        taken.append(spread.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return tuple(taken)


def clear_digests() -> None:
    """Have digests of weights computed anew."""
    _known.clear()


def weights_of(model: nn.Module, saved: Mapping[str, str], values: Values) -> dict[str, torch.Tensor] | str:
    """The weights of a model that a cache was made with.

    Args:
        model: It, or a module around it.
        saved: Name to digest.
        values: Of `traced_values`: the Python values that it has to have too.

    Returns:
        The weights by name; or the missing or changed one, or another value, as half a sentence.
    """
    lacking: dict[int, str] = {}  # how far a module is like the one that was saved, and what it lacks
    for module in model.modules():
        found: dict[str, torch.Tensor] = {}
        for name, wanted in saved.items():
            weight = tensor_of(module, name)
            if weight is None or weight_digest(weight) != wanted:
                lacks = f"has {'no weight' if weight is None else 'other numbers in'} {name!r}"
                lacking.setdefault(len(found), lacks)
                break
            found[name] = weight
        else:
            other = differing(module, values)
            if other is None:
                return found
            lacking[len(saved)] = other
    return lacking[max(lacking)]


def config_digest(config: Any) -> str | None:
    """Hash of the fields of a transformers config that change the model's numbers; None for other models."""
    if not hasattr(config, "to_dict"):
        return None
    text = json.dumps(_relevant(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _relevant(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {str(key): _relevant(item) for key, item in value.items() if not is_silent(str(key))}


def config_of(model: nn.Module, saved: str | None) -> Any:
    """The config of that `config_digest` that a model or a module inside has; None where there is none."""
    configs = {id(config): config for config in (getattr(each, "config", None) for each in model.modules())}
    return next((config for config in configs.values() if config_digest(config) == saved), None)


def check_ids(ids: torch.Tensor) -> torch.Tensor:
    """Token ids, if they are integers `[batch, tokens]`.

    Raises:
        ConfigError: If they are not.
    """
    if not isinstance(ids, torch.Tensor):
        raise ConfigError(f"input_ids are a {type(ids).__name__}: give a tensor of integers [batch, tokens].")
    if ids.dim() != 2 or ids.is_floating_point():
        raise ConfigError(f"input_ids are {ids.dtype} {tuple(ids.shape)}: give integers [batch, tokens].")
    return ids


def token_hash(ids: torch.Tensor) -> str:
    """SHA-256 of token ids, integers `[batch, tokens]`."""
    return hashlib.sha256(
        f"{tuple(ids.shape)}".encode() + ids.cpu().to(torch.int64).numpy().tobytes()
    ).hexdigest()

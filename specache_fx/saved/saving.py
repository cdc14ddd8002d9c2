"""`save`: a KV cache in a file, to go on with in another process without reading its tokens again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from specache_fx.api import NO_CACHE
from specache_fx.errors import CacheHandleError, SavedCacheError
from specache_fx.runners.base import inference
from specache_fx.runtime.handles.handle_tensor import Handle, plain
from specache_fx.runtime.session.parts import SessionPart, parts_of
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.session.snapshot import SessionHeader, snapshot
from specache_fx.saved.cache_tree import describe
from specache_fx.saved.fingerprint import check_ids, config_digest, token_hash, weight_digest
from specache_fx.saved.tensor_file import write

FILE = "cache.safetensors"
FORMAT = 7  # counts up when older versions can't read new files, or new versions old files


def save(past_key_values: Any, folder: str | Path, *, input_ids: torch.Tensor | None = None) -> None:
    """Save a KV cache, so that `load` restores it in another process.

    One file, `cache.safetensors`, holds codes, windows, host rows, padding and lookahead as they are. It takes the
    place of an older one when it is whole; until then, and after an error, the older one stays. Nothing is pickled. The
    file is readable by its owner alone: it tells the text to whoever reads it. A step that another thread runs on
    this cache is waited for, and steps wait until it is saved. If a step has just passed this length, its
    speculative token is dropped.

    Args:
        past_key_values: As for `stats`; all of its tensors, at the length that they have. Besides these it may hold
            other tensors (a layer that is left alone), numbers and strings.
        folder: Made if need be. Other files in it stay, but for those that killed processes left half-written.
        input_ids: The tokens that the cache is of, integers `[batch, tokens]`: `load` can compare a hash of them.

    Raises:
        CacheHandleError: If there is no cache of this backend in it, a part of one alone, or a released one.
        SavedCacheError: If the file can't be written, something in the cache can't be, the model is gone, or
            `input_ids` are not the tokens of the cache.
    """
    with content(past_key_values, input_ids) as (about, tensors):
        write_to(Path(folder) / FILE, about, tensors)


def write_to(path: Path, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the result of `content` to a file, whose folder is made if need be.

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
    """JSON and tensors of a saved cache. No step runs on the cache within the block. Raises as `save`."""
    with inference(), contextlib.ExitStack() as held:
        seen: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> int:
            seen.append(tensor)
            return len(seen) - 1

        tree = describe(past_key_values, note)
        if any(isinstance(tensor, Handle) and hasattr(tensor, "version") for tensor in seen):
            raise SavedCacheError(
                "A cache of fixed length, which the model writes in place, can't be saved. Run the prompt with a cache"
                " that grows (DynamicCache), and save that."
            )
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
            "cache": tree,
        }
        yield about, tensors


def _about(part: SessionPart) -> dict[str, Any]:
    origin = part.session.origin
    return {
        **SessionHeader.of(part.session).to_json(),
        "places": part.places,
        "forms": part.session.forms,
        "model_config": config_digest(origin.model_config),
        "weights": {name: weight_digest(weight) for name, weight in origin.weights().items()},
        "values": origin.values(),
    }


def _hash(session: Session, input_ids: torch.Tensor) -> str:
    input_ids = check_ids(input_ids)
    expected = session.batch, session.kv_len
    if tuple(input_ids.shape) != expected:
        raise SavedCacheError(
            f"input_ids are {tuple(input_ids.shape)}, but the cache is of {expected} tokens. Give the tokens that it"
            " holds: generate() returns one more than it has put into its cache."
        )
    other = session.tokens.differ(input_ids.to(session.device))
    if other is not None:
        raise SavedCacheError(
            f"input_ids are not the tokens of this cache: token {other} is another. Give those that it holds."
        )
    return token_hash(input_ids)

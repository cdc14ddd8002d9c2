"""`PrefixStore`: a folder of saved caches, found by the tokens that a prompt begins with."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

import torch
from filelock import FileLock
from torch import nn

from specache_fx._log import warn_once
from specache_fx.errors import CacheHandleError, ConfigError, SavedCacheError
from specache_fx.runtime.session.snapshot import HELD_OPTIONS
from specache_fx.saved.fingerprint import check_ids, digest
from specache_fx.saved.loading import cuts, fitting, restored, warn_if_plain
from specache_fx.saved.saving import content, write_to
from specache_fx.saved.tensor_file import TensorFile, file_bytes, opened

logger = logging.getLogger(__name__)
_NAME = re.compile("[0-9a-f]{32}")  # of an entry: its `_key`
_IDS = "input_ids"  # the tensor of an entry's tokens, int64 `[batch, tokens]`
T = TypeVar("T")


class PrefixStore:
    """Saved caches of prompts in one folder: a document is read once, and asked about in later processes.

    Several processes may use one folder: whoever puts, or removes a damaged entry, waits for others that do. Nobody
    else waits to get. Entries of other models and options may share it. A cache of more than one sequence is found by
    the tokens and the padding of all.

    Args:
        folder: Made if need be. Its files hold the texts' tokens. Files of others in it stay, and don't count.
        max_bytes: Most bytes of all files together. The least recently used entries go first.

    Raises:
        ConfigError: If `max_bytes` is no whole number above 0.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ConfigError(f"max_bytes={max_bytes!r} is not valid: give a whole number of bytes above 0.")
        self.folder, self.max_bytes = Path(folder), max_bytes

    def put(self, input_ids: torch.Tensor, past_key_values: Any) -> None:
        """Save a cache, unless the same one is there.

        Args:
            input_ids: The tokens that it holds, integers `[batch, tokens]`.
            past_key_values: As for `specache_fx.save`.

        Raises:
            CacheHandleError: As `specache_fx.save`.
            SavedCacheError: As `specache_fx.save`, or if it is larger than `max_bytes`.
        """
        check_ids(input_ids)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The lock first: steps wait for the cache while it is held, and other processes may write for long.
            with FileLock(self.folder / ".lock"), content(past_key_values, input_ids) as (about, tensors):
                self._put(input_ids, about, tensors)
        except OSError as error:
            raise SavedCacheError(
                f"The store in {str(self.folder)!r} can't be written to: {error.strerror or error}. Give a folder"
                " on a disk with room."
            ) from error

    def _put(self, input_ids: torch.Tensor, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """With the lock."""
        path = self.folder / f"{_key(about, tensors)}.safetensors"
        tensors = {**tensors, _IDS: input_ids.to(torch.int64)}
        nbytes = file_bytes(tensors, about)
        if nbytes > self.max_bytes:
            raise SavedCacheError(
                f"This cache takes {nbytes:,} bytes, and the store in {str(self.folder)!r} has {self.max_bytes:,}."
                " Give it a larger max_bytes."
            )
        if path.is_file():
            with contextlib.suppress(SavedCacheError), opened(path):  # a damaged one is written anew
                _touch(path)
                return
        self._make_room(nbytes)
        write_to(path, about, tensors)

    def get(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[Any, int]:
        """Restore the cache of the longest saved beginning of a prompt.

        An entry that agrees with the prompt in its first tokens alone is cut there. It can't be under `policy="kivi"`,
        which keeps no 16-bit pairs, nor with windows or other layers that count tokens by themselves. The prompt's last
        token is always left to be read. An entry that is damaged is removed, with a warning. Files that this user can't
        read, or that are no entries, are passed over, with one warning each.

        Args:
            model: As for `specache_fx.load`; entries of other models and options are passed over. The log says why, at
                level INFO.
            input_ids: The whole prompt, integers `[batch, tokens]`.
            attention_mask: Its padding, as for `model.generate`, of the same shape; none by default. Entries that were
                padded otherwise are passed over.

        Returns:
            A cache for `model.generate(input_ids, past_key_values=...)` and how many tokens it holds; None and 0 where
            nothing fits.

        Raises:
            ConfigError: If `input_ids` are no integers `[batch, tokens]`, or `attention_mask` has another shape.
            HostMemoryError: If the host tier can't take it.
        """
        ids = check_ids(input_ids).cpu()
        if attention_mask is not None and attention_mask.shape != ids.shape:
            raise ConfigError(
                f"attention_mask is {tuple(attention_mask.shape)}, input_ids are {tuple(ids.shape)}: give a mask of the"
                " tokens' shape."
            )
        warn_if_plain(model)
        found = []
        for path, stat in self._entries().items():
            agrees = self._read(path, stat, lambda file: _agreement(file, ids))
            if agrees is not None and agrees[0]:
                found.append((*agrees, stat.st_mtime, path, stat))
        # The longest first. Of equal ones, those that need no cut come first, then the newest.
        for common, whole, _, path, stat in sorted(found, key=lambda each: each[:3], reverse=True):
            use = partial(_restored, model, _real(attention_mask, common), common, whole)
            if (cache := self._read(path, stat, use)) is not None:
                _touch(path)
                return cache, common
        return None, 0

    def _read(self, path: Path, stat: os.stat_result, use: Callable[[TensorFile], T | None]) -> T | None:
        """The result of `use` for an entry; None where it can't be read. A damaged entry is removed."""
        try:
            with opened(path) as file:
                return use(file)
        except CacheHandleError as error:
            logger.info("%s is passed over: %s", path, error)
        except SavedCacheError as error:
            if isinstance(error.__cause__, PermissionError):  # it may be whole: another user can tell
                _pass_over(path, error)
            else:
                self._drop(path, stat, str(error))
        return None

    def _drop(self, path: Path, stat: os.stat_result, reason: str) -> None:
        """Remove a damaged entry, unless another process has removed or replaced it since it was listed."""
        try:
            with FileLock(self.folder / ".lock"), contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == stat.st_ino:
                    logger.warning("specache removes %s from its store: %s", path, reason)
                    path.unlink()
        except OSError as error:
            logger.warning("specache can't remove %s from its store (%s): %s", path, error, reason)

    def _entries(self) -> dict[Path, os.stat_result]:
        """The regular files that have an entry's name. What else ends so is somebody else's."""
        found = {}
        for path in self.folder.glob("*.safetensors"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process has just removed it
                continue
            except OSError as error:
                _pass_over(path, error)
                continue
            if S_ISREG(stat.st_mode) and _NAME.fullmatch(path.stem):
                found[path] = stat
            else:
                _pass_over(path, "it is no file that a store writes.")
        return found

    def _make_room(self, nbytes: int) -> None:
        """Remove the least recently used entries until so many bytes fit."""
        entries = self._entries()
        held = sum(stat.st_size for stat in entries.values())
        for path, stat in sorted(entries.items(), key=lambda each: each[1].st_mtime):
            if held + nbytes <= self.max_bytes:
                return
            held -= stat.st_size
            path.unlink(missing_ok=True)


def _restored(model: nn.Module, real: torch.Tensor | None, common: int, whole: bool, file: TensorFile) -> Any:
    """The first tokens of an entry; None where it is passed over."""
    found = fitting(model, file)
    if isinstance(found, str):
        reason = found
    elif not whole and not cuts(file):
        reason = f"it can't be cut to {common} tokens."
    elif not all(_same(_real(mask, common), real) for mask in _masks(file)):
        reason = "it was padded otherwise."
    else:
        return restored(model, file, found, common)
    logger.info("%s is passed over: %s", file.path, reason)
    return None


def _touch(path: Path) -> None:
    """It is used now."""
    with contextlib.suppress(OSError):  # another process has just removed it
        os.utime(path)


def _pass_over(path: Path, reason: object) -> None:
    warn_once(logger, f"specache passes over {path} in its store: {reason}")


def _key(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """Hash of a cache's tokens, padding, model and the options that decide its content."""
    options = [[session["config"][name] for name in HELD_OPTIONS] for session in about["sessions"]]
    models = [
        [session[name] for name in ("model_config", "weights", "values", "dtype")]
        for session in about["sessions"]
    ]
    masks = [_real(tensors.get(f"{i}.mask"), each["kv_len"]) for i, each in enumerate(about["sessions"])]
    padding = [None if mask is None else digest(mask) for mask in masks]
    text = json.dumps([_IDS, about["format"], about["tokens"], padding, options, models], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _masks(file: TensorFile) -> list[torch.Tensor | None]:
    """`KeyMask.real` of each session of a file."""
    names = [f"{i}.mask" for i in range(len(file.about["sessions"]))]
    return [file.read(name) if name in file.names else None for name in names]


def _real(mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """A mark for each of the first tokens that is no padding, bool `[batch, tokens]` on the CPU; None where all are."""
    if mask is None:
        return None
    known = mask[:, :tokens].cpu().bool()
    real = torch.nn.functional.pad(known, (0, tokens - known.shape[1]), value=True)
    return None if bool(real.all()) else real


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _agreement(file: TensorFile, ids: torch.Tensor) -> tuple[int, bool] | None:
    """The number of an entry's tokens that a prompt begins with, its last one left out, and whether these are all."""
    saved = file.read(_IDS) if _IDS in file.names else None
    if saved is None or saved.dim() != 2 or len(saved) != len(ids):
        return None
    most = min(saved.shape[1], ids.shape[1] - 1)
    same = (saved[:, :most] == ids[:, :most]).all(0)
    common = most if same.all() else int(same.int().argmin())
    return common, common == saved.shape[1]

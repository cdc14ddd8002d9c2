"""`Entry`: one saved cache of a `PrefixStore`."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch

from specache_fx.tensor_file import regular, replacing

logger = logging.getLogger(__name__)
# What is raised for a file that is damaged, gone or no regular one.
_DAMAGED = (OSError, ValueError, EOFError, SyntaxError, TokenError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Entry:
    """A file, and its tokens beside it, int64 `[batch, tokens]`.

    Attributes:
        path: The file, as `specache_fx.save` writes it.
    """

    path: Path

    @property
    def tokens(self) -> Path:
        """The file of its tokens."""
        return self.path.with_suffix(".npy")

    @property
    def nbytes(self) -> int:
        """Bytes of both files."""
        found = 0
        for path in (self.path, self.tokens):
            with contextlib.suppress(OSError):
                found += path.stat().st_size
        return found

    def touch(self) -> None:
        """It is used now."""
        with contextlib.suppress(OSError):  # another process has just removed it
            os.utime(self.path)

    @property
    def used(self) -> float:
        """When it was put or got last."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime
        return 0.0

    def is_whole(self) -> bool:
        """Whether both files are there."""
        return self.path.is_file() and self.tokens.is_file()

    def version(self) -> tuple[int, ...] | None:
        """Identity of its files, which differs from that of their replacements; None where its file is gone."""
        found = []
        for path in (self.path, self.tokens):
            with contextlib.suppress(OSError):
                found.append(path.stat().st_ino)
        return tuple(found) or None

    def drop(self, reason: str | None = None) -> None:
        """Remove it, and say why if there is a reason. For the holder of the store's lock."""
        if reason is not None:
            logger.warning("specache removes %s from its store: %s", self.path, reason)
        for path in (self.path, self.tokens):
            path.unlink(missing_ok=True)

    def read_tokens(self) -> np.ndarray[Any, Any] | None:
        """Its tokens; None where the file is damaged or gone.

        Raises:
            PermissionError: If this user may not read them.
        """
        try:
            with regular(self.tokens) as file:
                if np.lib.format.read_magic(file) != (1, 0):
                    return None
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
                is_ours = len(shape) == 2 and min(shape) >= 0 and not is_fortran and dtype == np.int64
                nbytes = os.fstat(file.fileno()).st_size - file.tell()
                if not is_ours or 8 * shape[0] * shape[1] != nbytes:  # before so much is read
                    return None
                data = file.read(nbytes)
        except PermissionError:
            raise
        except _DAMAGED:
            return None
        return np.frombuffer(data, np.int64).reshape(shape).copy() if len(data) == nbytes else None

    def write_tokens(self, ids: torch.Tensor) -> None:
        """Put its tokens in their place, all at once."""
        with replacing(self.tokens) as file:
            np.save(file, ids.cpu().to(torch.int64).contiguous().numpy(), allow_pickle=False)

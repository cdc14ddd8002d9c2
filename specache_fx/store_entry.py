"""`Entry`: one saved cache of a `PrefixStore`."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from specache_fx.tensor_file import PARTIAL

logger = logging.getLogger(__name__)
# What NumPy raises for a file that is damaged or gone. The file is mapped, so a header that tells of more than there is
# asks for no memory.
_DAMAGED = (FileNotFoundError, IsADirectoryError, ValueError, EOFError, SyntaxError, TokenError, BadZipFile)


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
        return sum(path.stat().st_size for path in (self.path, self.tokens) if path.exists())

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
        with contextlib.suppress(FileNotFoundError):
            inode = self.path.stat().st_ino
            return (inode, self.tokens.stat().st_ino) if self.tokens.exists() else (inode,)
        return None

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
            found: Any = np.load(self.tokens, mmap_mode="r", allow_pickle=False)
        except _DAMAGED:
            return None
        is_ours = isinstance(found, np.ndarray) and found.ndim == 2 and found.dtype == np.int64
        return np.array(found) if is_ours else None

    def write_tokens(self, ids: torch.Tensor) -> None:
        """Put its tokens in their place, all at once."""
        with tempfile.NamedTemporaryFile(prefix=PARTIAL, dir=self.path.parent, delete=False) as file:
            np.save(file, ids.cpu().to(torch.int64).numpy(), allow_pickle=False)
        os.replace(file.name, self.tokens)

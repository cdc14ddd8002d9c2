"""One safetensors file that is whole or not there: written tensor by tensor, with a digest of each, renamed last.

`safetensors.torch.save_file` wants all tensors at once and contiguous. Those of a cache are views of larger ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from specache_fx.errors import SavedCacheError
from specache_fx.saved.fingerprint import digest
from specache_fx.saved.json_form import FormError, check, parse

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
PARTIAL = ".partial-"  # prefix of files that are being written
_NO_DIGEST = "0" * 32


def write(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    """Write a file, or leave the one that is there as it is.

    Args:
        path: Its folder exists.
        tensors: By name; on any device, of any strides. One at a time is copied where it isn't contiguous.
        about: Values that JSON has.

    Raises:
        OSError: If it can't be written.
    """
    tensors = _aligned(tensors)
    with replacing(path) as file:
        digests = dict.fromkeys(tensors, _NO_DIGEST)
        file.write(_header(tensors, digests, about))
        for name, tensor in tensors.items():
            plain = tensor.detach().cpu().contiguous()
            digests[name] = digest(plain)
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
        # Digests are known now, and as long as their placeholders.
        file.seek(0)
        file.write(_header(tensors, digests, about))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, which takes a file's place when the block ends, and is gone after an error.

    What killed processes left in the folder is removed first: a living one holds a lock on its file.

    Raises:
        OSError: If it can't be written.
    """
    for left in path.parent.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError), regular(left) as old:
            if _lock(old.fileno(), wait=False):
                left.unlink()
    while True:
        fd, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
        _lock(fd, wait=True)
        if os.fstat(fd).st_nlink:  # else another process has removed it before it was locked
            break
        os.close(fd)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
            os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _lock(fd: int, wait: bool) -> bool:
    """Lock a file until it is closed, or its process is killed. False where another has, or there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def regular(path: Path) -> Iterator[BinaryIO]:
    """A file to read, if it is a regular one: no pipe, which would have to be waited for, no device, no folder.

    Raises:
        OSError: If it is not, or can't be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield file


def file_bytes(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> int:
    """Bytes of the file that `write` makes of these."""
    header = _header(_aligned(tensors), dict.fromkeys(tensors, _NO_DIGEST), about)
    return len(header) + sum(tensor.nbytes for tensor in tensors.values())


def _aligned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In an order in which each begins where its words, and the digest's, may begin; the format has no holes."""
    names = sorted(tensors, key=lambda name: (tensors[name].nbytes % 64 != 0, -tensors[name].itemsize))
    return {name: tensors[name] for name in names}


def _header(
    tensors: Mapping[str, torch.Tensor], digests: Mapping[str, str], about: Mapping[str, Any]
) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps({"about": about, "digests": digests, "tensors": entries})
    entries["__metadata__"] = {"specache_fx": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


class TensorFile:
    """A file that `write` made, mapped; its tensors are read when they are asked for.

    Attributes:
        path: Where it is.
        about: The `about` that `write` was given.
        names: The tensors' names.
        nbytes: Size of the file.

    Raises:
        FormError: If its header is not as `write` makes it.
    """

    def __init__(self, path: Path, opened: Any, nbytes: int) -> None:
        self.path, self._opened, self.nbytes = path, opened, nbytes
        kept = opened.metadata() or {}
        text = kept.get("specache_fx", "")
        if hashlib.sha256(text.encode()).hexdigest() != kept.get("sha256"):
            raise SavedCacheError(
                f"{path} is no cache that specache_fx.save wrote, or its header was changed.{AGAIN}"
            )
        content = parse(text)
        check(content, {"about": dict, "digests": {str: str}, "tensors": dict}, "")
        self.about: dict[str, Any] = content["about"]
        self._digests: dict[str, str] = content["digests"]
        self.names = tuple(self._digests)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU: mapped memory, valid until the file is closed.

        Raises:
            SavedCacheError: If it can't be read, or its bytes are not those that were written.
        """
        try:
            tensor: torch.Tensor = self._opened.get_tensor(name)
        except SafetensorError as error:
            raise unreadable(self.path, error) from error
        if digest(tensor) != self._digests[name]:
            raise SavedCacheError(
                f"{self.path} is damaged: the bytes of {name!r} are not those that were saved.{AGAIN}"
            )
        return tensor


AGAIN = (
    " Save the cache again: read the prompt with the compiled model, then specache_fx.save(cache, folder)."
)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[TensorFile]:
    """Map a file.

    Raises:
        SavedCacheError: If there is none, it can't be read, is cut short or is not one of ours.
    """
    with contextlib.ExitStack() as held:
        try:  # not the caller's block: its errors are no fault of the file
            # It is opened twice, to read its header and to map it; its place may be taken by another file in between.
            source = held.enter_context(regular(path))
            same = Path(f"/proc/self/fd/{source.fileno()}")
            mapped = held.enter_context(
                safe_open(same if same.exists() else path, framework="pt", device="cpu")
            )
            file = TensorFile(path, mapped, os.fstat(source.fileno()).st_size)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SavedCacheError(
                f"There is no saved cache in {str(path.parent)!r}: no file {path.name}.{AGAIN}"
            ) from error
        except (SafetensorError, OSError, FormError) as error:
            raise unreadable(path, error) from error
        yield file


def unreadable(path: Path, error: Exception) -> SavedCacheError:
    """The error for a file that is none of ours, or damaged."""
    return SavedCacheError(f"{path} can't be read, it was cut short or is no such file: {error}.{AGAIN}")

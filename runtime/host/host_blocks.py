"""The blocks of `HostCache`: plain memory, page-locked memory, or a mapped file that leaves no trace."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from math import prod

import torch

from specache_fx._log import warn_once
from specache_fx.errors import ConfigError, HostMemoryError, first_line
from specache_fx.runtime.host.machine_memory import available_bytes, disk_folder, memory_file_system
from specache_fx.runtime.native import cudart

logger = logging.getLogger(__name__)

_ASKED_AGAIN_S = 0.1
_CHECKED_BYTES = 1 << 20


def resolve_host(host: str, device: torch.device, nbytes: int = 0, host_dir: str | None = None) -> str:
    """Turn the option `host` into the kind of store for a session on `device`.

    Args:
        host: "auto", "pinned", "memory" or "disk".
        device: Where the model runs.
        nbytes: Bytes that the session's first prompt will ask for.
        host_dir: The option, for the warning.

    Returns:
        "pinned", "memory" or "disk". "auto" is "pinned" for CUDA, where copies run beside compute only from page-locked
        memory, and "memory" elsewhere. Where there is too little of it, "auto" is "disk", with a warning.

    Raises:
        ConfigError: If "pinned" is asked for without a CUDA device.
        HostMemoryError: If there is too little memory for "auto", and the folder is in memory too.
    """
    if host == "auto":
        if nbytes >= _CHECKED_BYTES and nbytes > (available := available_bytes()):
            folder = disk_folder(host_dir)
            seen = (
                f"The 16-bit KV pairs of this prompt, or of what reserve= asks for, take {nbytes:,} bytes,"
                f" and {available:,} bytes of memory are available"
            )
            if (kind := memory_file_system(folder)) is not None:
                raise HostMemoryError(
                    f"{seen}; {folder!r} is a {kind}, which is memory too. Give host_dir= a folder on a disk, or use a"
                    " smaller batch or a shorter context."
                )
            warn_once(
                logger,
                f"{seen}: they go to a file under {folder!r}, which is slower. Choose the folder with host_dir=, or use"
                ' host="disk" to have it always and without this warning.',
            )
            return "disk"
        return "pinned" if device.type == "cuda" else "memory"
    if host == "pinned" and not torch.cuda.is_available():
        raise ConfigError('host="pinned" needs a CUDA device, and there is none: use host="auto".')
    return host


def check_host_dir(host: str, host_dir: str | None) -> None:
    """Say at once, not in the first prompt, that the folder of a disk tier can't be used, or is no disk's.

    Leaves nothing there.

    Args:
        host: The option. A folder is needed for "disk", and for "auto" if one is given.
        host_dir: The option; None is the system's temporary folder.

    Raises:
        ConfigError: If no file can be made in the folder.
    """
    if host != "disk" and (host != "auto" or host_dir is None):
        return
    folder = disk_folder(host_dir)
    if (kind := memory_file_system(folder)) is not None:
        warn_once(
            logger,
            f"16-bit KV pairs that go to a file would go to {folder!r}, but that is a {kind}: memory, and no disk. Give"
            ' host_dir= a folder on a disk, or use host="memory", which is faster.',
        )
    try:
        os.close(_open_unnamed(folder))
    except (OSError, ValueError) as error:  # a path may have characters that none has
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f'host="disk" can\'t keep a file under {folder!r}: {reason}. Give host_dir= a folder that exists'
            ' and can be written to, or use host="memory".'
        ) from error


class BlockStore(ABC):
    """Hands out blocks and counts them.

    Args:
        host_dir: Folder for files; see `machine_memory.disk_folder`.
        device: Reads page-locked blocks by itself; None: the current one of the thread that asks for a block.

    Attributes:
        nbytes: Bytes handed out so far.
    """

    def __init__(self, host_dir: str | None, device: torch.device | None = None) -> None:
        self.nbytes = 0
        self._host_dir, self._device = host_dir, device
        self._lock = threading.Lock()  # a thread may reserve ahead

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Hand out a block of that shape on the CPU; its content is undefined.

        Raises:
            HostMemoryError: If it can't be had; nothing has changed then.
        """
        nbytes = prod(shape) * dtype.itemsize
        # Not an inference tensor, whoever asks: worker threads write to it later, outside of the caller's
        # mode.
        with self._lock, torch.inference_mode(False):
            block = self._allocate(shape, dtype, nbytes)
            self.nbytes += nbytes
        return block

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor: ...

    def close(self) -> None:
        """Give back the rest, beyond the blocks themselves; the caller has dropped them."""
        self.nbytes = 0


class MemoryStore(BlockStore):
    """Plain memory."""

    _kind, _other = "memory", "disk"

    def __init__(self, host_dir: str | None, device: torch.device | None = None) -> None:
        super().__init__(host_dir, device)
        self._available, self._asked = 0, -_ASKED_AGAIN_S

    def _left(self, nbytes: int) -> int:
        """Bytes of memory that are available. The system is asked each 0.1 s, or for more than half of the rest."""
        now = time.monotonic()
        if now - self._asked > _ASKED_AGAIN_S or nbytes > self._available // 2:
            self._available, self._asked = available_bytes(), now
        return self._available

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        # The kernel promises memory that it doesn't have, and kills the process when it is written to: ask
        # first.
        available = self._left(nbytes) if nbytes >= _CHECKED_BYTES else nbytes
        if nbytes > available:
            raise HostMemoryError(
                f"The host tier asked for {nbytes:,} bytes more (it holds {self.nbytes:,}), and {available:,}"
                ' bytes of memory are available. Use host="disk", a smaller batch or a shorter context.'
            )
        try:
            block = self._get(shape, dtype, nbytes)
            self._available -= nbytes
            return block
        except (RuntimeError, OSError) as error:
            raise HostMemoryError(
                f"The host tier asked for {nbytes:,} bytes of {self._kind} more (it holds {self.nbytes:,}) and got:"
                f' {error}. Use host="{self._other}", a smaller batch or a shorter context.'
            ) from error

    def _get(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")


class PinnedStore(MemoryStore):
    """Page-locked memory, which a CUDA device copies from while it computes.

    It is mapped and registered here: torch's allocator rounds page-locked blocks up to powers of two, and keeps what is
    freed. The last view of a block gives its pages back to the system. Where CUDA refuses to register it, torch's
    allocator serves.
    """

    _kind, _other = "page-locked memory", "memory"

    def _get(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        memory = _map(-1, 0, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(memory)
        _keep_from_children(address, len(memory))
        try:
            cudart.register(address, len(memory), self._device)
        except OSError as refusal:
            del memory  # its pages may be there already
            return self._from_torch(shape, dtype, refusal)
        # Called before the finalizer that unmaps it: the newest finalizer of an object comes first.
        weakref.finalize(memory, cudart.unregister, address, self._device).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)

    def _from_torch(self, shape: tuple[int, ...], dtype: torch.dtype, refusal: OSError) -> torch.Tensor:
        try:
            with cudart.on(self._device):
                block = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise OSError(f"{refusal}; {first_line(error)}") from error
        warn_once(
            logger,
            f"The host tier can't page-lock memory by itself: {refusal}. torch's page-locked memory is used, which may"
            ' take up to twice as much, and which is not given back before the process ends. host="memory" takes none.',
        )
        return block


class DiskStore(BlockStore):
    """Mapped parts of one file without a name: the system frees it when the process ends, however it ends.

    The file is opened with the first block. Space is reserved before it is mapped: on a full disk a write to
    a sparse mapping would end the process by SIGBUS, where `posix_fallocate` returns an error.
    """

    def __init__(self, host_dir: str | None, device: torch.device | None = None) -> None:
        super().__init__(host_dir, device)
        self._fd: int | None = None
        self._size = 0
        self._closer: weakref.finalize[[int], DiskStore] | None = None

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        folder = disk_folder(self._host_dir)
        mapped = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            if memory_file_system(folder) is not None and mapped > (available := available_bytes()):
                raise OSError(f"it is in memory, of which {available:,} bytes are available")
            if self._fd is None:
                self._fd = _open_unnamed(folder)
                self._closer = weakref.finalize(self, os.close, self._fd)
            memory = self._reserve_and_map(self._fd, mapped)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(
                f"The host tier asked for {nbytes:,} bytes more in a file under {folder!r} (it holds"
                f" {self.nbytes:,}) and got: {error}. Give host_dir= a folder that exists, can be written to"
                ' and has room, or use host="memory".'
            ) from error
        self._size += mapped
        # The tensor keeps the mapping alive, and the last view of it unmaps.
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)

    def _reserve_and_map(self, fd: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        try:
            os.posix_fallocate(fd, self._size, nbytes)
            return _map(fd, self._size, nbytes, mmap.MAP_SHARED)
        except BaseException:
            # A reservation that failed half-way may have lengthened the file.
            os.ftruncate(fd, self._size)
            raise

    def close(self) -> None:
        """Close the file; its space is free once no view of a block is left."""
        super().close()
        self._size = 0
        if self._closer is not None:
            self._closer()
        self._fd = self._closer = None


def _open_unnamed(folder: str) -> int:
    """Open a file in `folder` that has no name, or loses it at once.

    Raises:
        OSError: If that can't be.
    """
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # Not every file system has files without a name (overlay and network ones, say).
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    fd, path = tempfile.mkstemp(prefix="specache-", dir=folder)
    os.unlink(path)
    return fd


def _map(fd: int, offset: int, nbytes: int, flags: int) -> ctypes.Array[ctypes.c_char]:
    """Map a part of a file, or memory; the last reference to the result unmaps it.

    Python's own `mmap` duplicates the descriptor for each mapping: a long cache would run out of descriptors.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: a copy may be under way then, and the system unmaps anyway.
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return memory


def _keep_from_children(address: int, nbytes: int) -> None:
    """Have a forked process get no share in pages that a device reads and writes.

    It would share them until one side writes. The pages of the side that writes are others then, perhaps the parent's.
    Sessions are of no use to a child (`registry`).
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.madvise(address, nbytes, mmap.MADV_DONTFORK)


STORES: dict[str, type[BlockStore]] = {"memory": MemoryStore, "pinned": PinnedStore, "disk": DiskStore}

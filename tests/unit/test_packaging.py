"""The wheel holds what an installed package needs, and the documents name only what exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.process import python

from specache_fx.examples.needle import make_prompts, to_text

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "specache_fx": "specache_fx",
    "passes": "specache_fx/passes",
    "runtime": "specache_fx/runtime",
    "examples": "specache_fx/examples",
}
MODELS = [ROOT / "examples" / name / "model" for name in ("needle", "suite")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """A wheel of this checkout, built aside: `build/` of the checkout may hold files that are gone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--no-index", "--wheel-dir", str(out), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("specache_fx-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def sources(pattern: str) -> set[str]:
    """Paths in the wheel that the checkout's files of a pattern should have."""
    return {
        f"{inside}/{path.relative_to(ROOT / outside).as_posix()}"
        for outside, inside in PACKAGES.items()
        for path in (ROOT / outside).rglob(pattern)
    }


def test_wheel_holds_modules_sources_types_and_trained_models(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    code = {name for name in names if name.endswith((".py", ".h", ".cpp"))}
    assert code == sources("*.py") | sources("*.h") | sources("*.cpp")
    assert any(name.endswith("attention.cpp") for name in code)
    models = {
        f"specache_fx/{path.relative_to(ROOT).as_posix()}" for model in MODELS for path in model.iterdir()
    }
    assert {"specache_fx/py.typed", *models} <= names


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {name.rpartition("/")[0] for name in sources("*.py")}
    assert folders == {name.rpartition("/")[0] for name in sources("__init__.py")}


def test_wheel_declares_the_backend_and_the_command(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    declared = ConfigParser()
    declared.read_string(wheel.read(name).decode())
    assert dict(declared["torch_dynamo_backends"]) == {"specache": "specache_fx.entry_point:specache"}
    assert dict(declared["console_scripts"]) == {"specache-fx": "specache_fx.cli:app"}


WITHOUT_A_CHECKOUT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specache_fx
from specache_fx.runtime.native import cpp_build
from specache_fx.runtime.native import graph_ops

assert "site" in specache_fx.__file__, specache_fx.__file__
assert cpp_build.find_compiler() is None
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).eval()
ids = torch.randint(64, (2, 40))
kept = dict(max_new_tokens=30, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
expected = model.generate(ids, **kept).sequences
model.compile(backend="specache", options={"bits": 16, "group_size": 8, "residual_length": 8, "lowering": "eager"})
out = model.generate(ids, **kept)
assert torch.equal(out.sequences, expected)
assert specache_fx.stats(out.past_key_values).topk_hit_rate > 0
assert graph_ops.load() is not None
"""


@pytest.mark.nightly
def test_wheel_alone_generates_without_a_compiler(tmp_path: Path) -> None:
    """`make wheel`, installed beside this environment's other packages; the checkout is not on the path."""
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True)
    (path,) = (ROOT / "dist").glob("specache_fx-*.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(path)], check=True)
    env = os.environ | {"PYTHONPATH": str(site), "CXX": "none", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for command in (
        [sys.executable, "-c", WITHOUT_A_CHECKOUT],
        [str(site / "bin" / "specache-fx"), "--help"],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert not list(tmp_path.rglob("cache/**/*.so"))


def test_torch_finds_the_backend_by_its_name() -> None:
    import torch

    from specache_fx.backend import specache

    (entry,) = entry_points(group="torch_dynamo_backends", name="specache")
    assert entry.load() is specache
    assert "specache" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("specache") is specache


def test_import_and_help_load_no_torch() -> None:
    code = """
        import sys
        import specache_fx
        from specache_fx import ConfigError, SpecacheConfig
        from specache_fx.cli import app
        sys.argv = ["specache-fx", "plan", "--help"]
        try:
            app()
        except SystemExit as end:
            assert not end.code
        assert not {"torch", "transformers", "numpy"} & set(sys.modules)
        import specache_fx.api, specache_fx.report.explanation  # whatever was imported first, names are what they say
        assert set(specache_fx.__all__) <= set(dir(specache_fx))
        assert all(callable(getattr(specache_fx, name)) for name in specache_fx.__all__)
        assert specache_fx.explain is specache_fx.report.explanation.explain
        assert not hasattr(specache_fx, "nothing")
        import torch
        assert torch.compile(torch.nn.Linear(2, 2), backend="specache") is not None
    """
    python("-c", textwrap.dedent(code))


def test_no_module_has_the_name_of_a_public_function() -> None:
    import specache_fx

    assert not {path.stem for path in (ROOT / "specache_fx").iterdir()} & set(specache_fx.__all__)


def test_constraints_pin_every_dependency_within_its_range() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[name.lower().replace("_", "-")] = version
    for text in project["dependencies"] + project["optional-dependencies"]["test"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name]), text


def test_import_of_a_folder_by_its_own_name_is_forbidden(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import passes\nfrom runtime import ops\nfrom passes.base import Pass\n")
    config = ["--config", str(ROOT / "pyproject.toml"), "--select", "TID251"]
    command = [sys.executable, "-m", "ruff", "check", *config, str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.count("TID251") == 3
    assert "import specache_fx.passes: `import passes` makes a second copy of the module" in done.stdout


@pytest.mark.parametrize(
    "document",
    [
        "CONTRIBUTING.md",
        *(
            f"docs/{name}.md"
            for name in ("architecture", "capture", "kernels", "laws", "paper_map", "performance")
        ),
    ],
)
def test_document_names_only_files_and_functions_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|txt|h|cpp)(?:::\w+(?:\.\w+)?)?)`", text))
    assert named, f"{document} names no file"
    missing = []
    for name in sorted(named):
        path, _, attribute = name.partition("::")
        if not (ROOT / path).is_file():
            missing.append(name)
            continue
        source = (ROOT / path).read_text()
        missing += [
            name
            for part in filter(None, attribute.split("."))
            if not re.search(rf"^\s*(?:(?:class|def) {part}\b|{part}\b[^=\n]*=)", source, re.MULTILINE)
        ]
    assert missing == []


@pytest.mark.slow
def test_first_example_of_the_readme_runs_as_written(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    _, lines = example[1].split("\n\n")  # the imports, and the five lines on a model
    assert len(lines.splitlines()) == 5
    (tmp_path / "MODEL").symlink_to(MODELS[0])
    records = make_prompts(1, 2000, 48, seed=0).input_ids[0, 1:]  # the tokenizer adds the first token itself
    (tmp_path / "prompt.txt").write_text(to_text(records))
    printed = python("-c", example[1], cwd=tmp_path)
    told = {name: int(number) for name, number in re.findall(r"\b(\w+)=(\d+),", printed)}
    assert 2000 < told["kv_len"] <= 2002 + 64
    assert told["device_bytes"] < 0.3 * told["full_bytes"]

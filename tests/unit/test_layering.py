"""Imports follow the data (CONTRIBUTING.md, "Layout"): a module imports only what stands below it.

`RANKS` is the whole order, from the command line down to the leaves; a new module has to be given its place.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"specache_fx": "specache_fx", "passes": "specache_fx.passes", "runtime": "specache_fx.runtime"}

# Highest first. A name stands for itself and, if it is a package, for all in it that has no line of its own.
RANKS: tuple[tuple[str, ...], ...] = (
    ("specache_fx.cli",),  # which nothing of the core imports
    ("specache_fx.examples",),
    ("specache_fx",),  # only its __init__
    ("specache_fx.entry_point",),
    ("specache_fx.saved.prefix_store", "specache_fx.calls.warming"),
    ("specache_fx.saved.loading",),
    ("specache_fx.saved.saving",),
    (
        "specache_fx.report.explanation",
        "specache_fx.api",
        "specache_fx.report.chrome_trace",
    ),
    ("specache_fx.calls.dispatcher",),
    ("specache_fx.backend",),
    (
        "specache_fx.calls.filling",
        "specache_fx.calls.rehearsal",
        "specache_fx.calls.background",
        "specache_fx.direct.direct_step",
    ),
    ("specache_fx.calls.static_cache",),
    ("specache_fx.calls.call", "specache_fx.direct.direct_trace"),
    ("specache_fx.direct.model_state", "specache_fx.direct.model_twin"),
    ("specache_fx.dynamo.retrace",),
    ("specache_fx.dynamo.dynamo_hooks",),
    (
        "specache_fx.runners.decode_runner",
        "specache_fx.runners.fixed_runner",
        "specache_fx.report.session_stats",
    ),
    ("specache_fx.runners.border",),
    ("specache_fx.runners.base", "specache_fx.runners.step_masks", "specache_fx.runners.graph_inputs"),
    ("specache_fx.lowering", "specache_fx.saved.tensor_file"),
    ("specache_fx.runners.layer_parts", "specache_fx.dynamo.graph_breaks"),
    ("specache_fx.saved.fingerprint",),
    ("specache_fx.direct.traced_values", "specache_fx.saved.json_form", "specache_fx.calls.known_caches"),
    ("specache_fx.passes",),
    ("specache_fx.capture.analyse",),
    ("specache_fx.capture.caches",),
    ("specache_fx.capture.attention",),
    ("specache_fx.capture.positions",),
    ("specache_fx.capture.program",),
    ("specache_fx.capture.graph",),
    ("specache_fx.capture",),  # only its __init__
    ("specache_fx.runtime.ops",),
    ("specache_fx.runtime.session",),
    ("specache_fx.runtime.graph",),
    ("specache_fx.runtime.steps",),
    ("specache_fx.runtime.transfer",),
    ("specache_fx.runtime.layers",),
    ("specache_fx.runtime.handles",),
    ("specache_fx.runtime.host",),
    ("specache_fx.runtime.kernels",),
    ("specache_fx.runtime.select",),
    ("specache_fx.runtime.quant",),
    ("specache_fx.runtime.native",),
    ("specache_fx.runtime.tracing",),
    ("specache_fx.runtime",),  # only its __init__, which imports nothing
    ("specache_fx.direct.inductor_start",),
    ("specache_fx.calls.this_thread",),
    ("specache_fx.report.progress",),
    ("specache_fx.config",),
    ("specache_fx.compiled", "specache_fx.saved.cache_tree"),
    ("specache_fx.errors", "specache_fx._log"),
    ("specache_fx.resets",),
    (
        "specache_fx.calls",
        "specache_fx.direct",
        "specache_fx.dynamo",
        "specache_fx.report",
        "specache_fx.runners",
        "specache_fx.saved",
    ),  # their __init__ alone, which import nothing
)
BARE = (
    "",
    "specache_fx",
    "specache_fx.capture",
    "specache_fx.runtime",
    "specache_fx.calls",
    "specache_fx.direct",
    "specache_fx.dynamo",
    "specache_fx.runners",
    "specache_fx.saved",
    "specache_fx.report",
)
RANK = {name: len(RANKS) - i for i, names in enumerate(RANKS) for name in names}
# Packages whose modules may import one another.
PACKAGES = (
    "specache_fx.capture.attention",
    "specache_fx.capture.caches",
    "specache_fx.capture.graph",
    "specache_fx.capture.positions",
    "specache_fx.cli",
    "specache_fx.passes",
    "specache_fx.examples",
    "specache_fx.runtime.graph",
    "specache_fx.runtime.handles",
    "specache_fx.runtime.host",
    "specache_fx.runtime.kernels",
    "specache_fx.runtime.layers",
    "specache_fx.runtime.native",
    "specache_fx.runtime.quant",
    "specache_fx.runtime.select",
    "specache_fx.runtime.session",
    "specache_fx.runtime.steps",
    "specache_fx.runtime.transfer",
)


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for folder, package in {**FOLDERS, "examples": "specache_fx.examples"}.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def place(module: str) -> str | None:
    """The line of `RANKS` that a module falls under."""
    if module in RANK:
        return module
    parent = module.rpartition(".")[0]
    # The bare package names stand for their `__init__` alone: a new module of theirs needs a line.
    return None if parent in BARE else place(parent)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and module of each import of ours, those for types alone and those in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports within the package are absolute"
            base = node.module or ""
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def offences(module: str, source: str) -> list[str]:
    """Imports of a module that break the order, each as "module:line imports other"."""
    here = place(module)
    assert here is not None, f"{module} has no place in RANKS of {Path(__file__).name}: give it one"
    found = []
    for line, target in imports(ast.parse(source)):
        if target.split(".")[0] != "specache_fx":
            continue
        there = place(target)
        assert there is not None, f"{module}:{line} imports {target}, which has no place in RANKS"
        same = here == there and here in PACKAGES
        if not same and RANK[there] >= RANK[here]:
            found.append(f"{module}:{line} imports {target}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_stands_below_it(module: str) -> None:
    assert offences(module, MODULES[module].read_text()) == []


def test_imports_make_no_cycle() -> None:
    """Those within a package, which may import one another, too."""
    graph = {
        module: {target for _, target in imports(ast.parse(path.read_text())) if target in MODULES} - {module}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_library_does_not_know_its_laboratory() -> None:
    for module, path in MODULES.items():
        assert "specache_bench" not in path.read_text(), (
            f"{module} names the laboratory, which is no part of the wheel"
        )


def test_every_line_of_the_order_is_a_module() -> None:
    assert set(RANK) - set(MODULES) == set()


@pytest.mark.parametrize(
    ("module", "line", "named"),
    [
        (
            "specache_fx.runtime.layers.layer_cache",
            "from specache_fx.runtime.session import registry",
            "specache_fx.runtime.session.registry",
        ),
        ("specache_fx.runtime.ops", "import specache_fx.passes.base", "specache_fx.passes.base"),
        ("specache_fx.runtime.quant.kivi", "from specache_fx.runtime.select import select_topk", ".select"),
        ("specache_fx.passes.verify", "def f():\n  from specache_fx.backend import specache", ".backend"),
        ("specache_fx.errors", "from specache_fx import _log", "specache_fx._log"),
        (
            "specache_fx.passes.base",
            "if TYPE_CHECKING:\n  from specache_fx.backend import specache",
            ".backend",
        ),
    ],
)
def test_import_upwards_is_named(module: str, line: str, named: str) -> None:
    (offence,) = offences(module, line)
    assert offence.startswith(f"{module}:")
    assert offence.endswith(named)


def test_new_module_without_a_place_fails() -> None:
    with pytest.raises(AssertionError, match=r"runtime\.brand_new has no place in RANKS"):
        offences("specache_fx.runtime.brand_new", "")

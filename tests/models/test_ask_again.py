"""The example reads its document once: later processes load it, and answer as the first one did."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.process import python

from specache_fx.examples.ask_again import needle_document


def ask(store: Path, key: str) -> tuple[str, str]:
    said, loaded = python(
        "-m", "specache_fx.examples.ask_again", str(store), f"| {key}", "--lowering", "eager"
    ).splitlines()
    return said, loaded


@pytest.mark.nightly
def test_a_document_is_read_once_and_asked_about_again(tmp_path: Path) -> None:
    records = dict(re.findall(r"\| (key\d\d) ((?:v\d\d ?){4})", needle_document()))
    (first, second), store = list(records)[:2], tmp_path / "store"
    said, loaded = ask(store, first)
    assert said == records[first].strip() and loaded.startswith("0 of 2,00")
    (entry,) = store.glob("*.safetensors")
    written = entry.stat().st_ino
    said, loaded = ask(store, second)
    assert said == records[second].strip() and re.match(r"2,00\d of 2,00\d tokens were loaded", loaded)
    assert [path.stat().st_ino for path in store.glob("*.safetensors")] == [written]

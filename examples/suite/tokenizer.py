"""The tokenizer of the suite."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from specache_fx.examples.suite.words import BOS, EOS, PAD, WORDS
from specache_fx.examples.word_tokenizer import word_tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """See `word_tokenizer`."""
    return word_tokenizer(WORDS, PAD, BOS, EOS)

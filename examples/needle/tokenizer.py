"""The tokenizer of the needle task."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from specache_fx.examples.needle.task import BOS_ID, EOS_ID, PAD_ID, words
from specache_fx.examples.word_tokenizer import word_tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """See `word_tokenizer`."""
    return word_tokenizer(words(), PAD_ID, BOS_ID, EOS_ID)

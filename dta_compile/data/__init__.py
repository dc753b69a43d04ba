"""Token sequences from files: the project's rollout files and common formats. Imports no torch itself.

`read` detects the format by content: rollout files (`.npz`), JSON lines (token ids, chat transcripts, verl's dumps),
parquet (TRL's completions) and folders written by the package `datasets`.
"""

from dta_compile.data.batch import Batch, pad_batch
from dta_compile.data.read import Recording, read
from dta_compile.data.recorded import ReadOptions, Recorded
from dta_compile.data.rollouts import Rollout, bundled, load_rollouts, vocab_size
from dta_compile.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "ReadOptions",
    "Recorded",
    "Recording",
    "Rollout",
    "Tokenizer",
    "bundled",
    "load_rollouts",
    "pad_batch",
    "read",
    "vocab_size",
]

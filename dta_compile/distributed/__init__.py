"""Training on many ranks: one balanced prefix tree each (paper section "Load-Balanced Parallelization").

`scatter` redistributes the rows of all ranks, so that every rank trains a prefix tree of nearly equal cost;
`Shard.to_owners` returns results to the ranks that own the rows; `token_mean` normalises a loss over all ranks. These
use the collectives of torch.distributed in the program's process group. Gradients need no extra step: DDP and FSDP2
reduce them as always (see the README).
"""

from __future__ import annotations

from dta_compile.distributed.losses import global_count, token_mean
from dta_compile.distributed.shard import Shard, scatter
from dta_compile.distributed.traces import to_chrome_trace

__all__ = ["Shard", "global_count", "scatter", "to_chrome_trace", "token_mean"]

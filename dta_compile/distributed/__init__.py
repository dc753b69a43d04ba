"""Training on many ranks: one balanced prefix tree each (paper section "Load-Balanced Parallelization").

`scatter` deals the rows of all ranks out anew, so that every rank trains a prefix tree of nearly equal cost;
`Shard.to_owners` takes results of rows back to where they came from; `token_mean` normalises a loss over all ranks.
The collectives are torch.distributed's, in whatever group the program was launched with. Gradients need nothing of
this: DDP and FSDP2 reduce them as always (see the README).
"""

from __future__ import annotations

from dta_compile.distributed.losses import global_count, token_mean
from dta_compile.distributed.shard import Shard, scatter
from dta_compile.distributed.traces import to_chrome_trace

__all__ = ["Shard", "global_count", "scatter", "to_chrome_trace", "token_mean"]

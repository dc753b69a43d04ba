"""Measure the memory of one path over gloo ranks: the most that a rank allocates in a step.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.balancing.one_tree_memory

Only the first rank has a row. Prints a row of a table; run it with 1 and with 4 processes.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.measuring.allocations import allocated_at_the_peak, counting
from dta_compile.plan import one_tree

HEAD = """\
| ranks | tokens | tokens of a piece, at most | MB of each rank, at the peak of a step | seconds |
| --- | --- | --- | --- | --- |"""


class LogProbs(nn.Module):
    """Log-probs `[B, S]` of the next tokens, of a narrow Qwen3."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4}
        config = Qwen3Config(**sizes, head_dim=8, num_hidden_layers=layers, vocab_size=64, tie_word_embeddings=False)
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        labels = nn.functional.pad(input_ids[:, 1:], (0, 1))
        return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--block-kib", type=int, default=64, help="of states that travel at once (default: 64)")
    arguments = parser.parse_args()
    counting()
    one_tree.BLOCK_BYTES = arguments.block_kib * 1024
    dist.init_process_group("gloo")
    model = LogProbs(arguments.layers)
    options = {"strategy": "one_tree", "mesh": dist.group.WORLD, "chunk_size": arguments.chunk, "memory_budget": 0}
    model.compile(backend="dta", options={**options, "verify": "off"})
    ids = torch.arange(arguments.tokens)[None] * 7919 % 64
    mask = torch.full_like(ids, dist.get_rank() == 0)

    def step(count: int) -> None:
        logprobs = model(input_ids=ids[:, :count], attention_mask=mask[:, :count])
        (logprobs * mask[:, :count]).sum().backward()
        model.zero_grad(set_to_none=False)

    step(arguments.tokens // 16)
    start = time.perf_counter()
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, allocated_at_the_peak(lambda: step(arguments.tokens)))
    if dist.get_rank() == 0:
        sizes = ", ".join(f"{peak / 1e6:.1f}" for peak in peaks)
        print(HEAD)
        seconds = time.perf_counter() - start
        print(f"| {len(peaks)} | {arguments.tokens:,} | {arguments.chunk:,} | {sizes} | {seconds:.0f} |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The relations of tests/fuzz/relations.py, asked of every causal LM of the installed transformers at toy size.

python -m tests.fuzz.families [model types]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import zoo
from tests.fuzz import metamorphic
from tests.fuzz.metamorphic import BAD
from tests.support.helpers import FLOAT32_ISLANDS, make_batch, rollouts

LENGTH = 11  # tokens of the longest row
WINDOW = 5  # of toy configurations


class Scored(nn.Module):
    """Logits `[B, S, V]` of a causal LM from ids and a padding mask, `[B, S]` each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=pad, use_cache=False).logits


def maker(model_type: str) -> Callable[[], nn.Module]:
    """Builds a model in float64; experts run as a loop, which any dtype does."""
    config = zoo.toy_config(model_type)
    for implementation in ("sdpa", "eager"):
        try:
            with torch.device("meta"):
                shape = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
            break
        except ValueError:
            continue  # which has no such attention
    if sum(parameter.numel() for parameter in shape.parameters()) > 5_000_000:
        raise NotImplementedError("its configuration has sizes that the zoo does not know")

    def make() -> nn.Module:
        built = transformers.AutoModelForCausalLM.from_config(
            zoo.toy_config(model_type), attn_implementation=implementation
        )
        if built._can_set_experts_implementation():
            built.set_experts_implementation("eager")
        return Scored(built.double().train())

    return make


def verdict(model_type: str, seed: int = 0) -> tuple[str, str]:
    """Like the oracle's; rows share prefixes in every way and are padded at the right."""
    try:
        make = maker(model_type)
    except Exception as error:
        return "discarded", f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"

    def judged(rows: list[list[int]]) -> tuple[str, str]:
        batch = make_batch(rows)
        call = {"ids": batch.ids, "pad": batch.mask}
        return metamorphic.judge(
            make,
            lambda ids, pad: (pad.bool(),),
            call,
            {"chunk_size": 4},
            seed,
            FLOAT32_ISLANDS,
            dtype=torch.float32,
        )

    rows = rollouts(zoo.VOCABULARY, seed, LENGTH)
    found = judged(rows)
    if found == ("discarded", metamorphic.NOT_FINITE):  # padding whose window holds no token at all
        found = judged([row for row in rows if len(row) + WINDOW > LENGTH])
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    failed = False
    for model_type in arguments.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        started = time.perf_counter()
        kind, detail = verdict(model_type, arguments.seed)
        failed |= kind in BAD
        print(
            f"{model_type:24} {kind:9} {time.perf_counter() - started:5.0f} s  {' | '.join(detail.splitlines())}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())

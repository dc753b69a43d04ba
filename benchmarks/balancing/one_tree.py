"""Simulate one tree over ranks: balance, what ranks exchange, and the predicted step against own trees.

    python -m benchmarks.balancing.one_tree FOLDER [--ranks 2,4,8,64] [--output benchmarks/ONE_TREE.md]

FOLDER has the rollout files that BATCHES names. Writes a page. Needs transformers for models' sizes, no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import numpy as np

from dta_compile.data import Recorded, read
from dta_compile.estimate.devices import DEVICES
from dta_compile.estimate.over_ranks import OverRanks, bytes_of_rank
from dta_compile.estimate.predict import BYTES_16BIT, ModelShape, Ranks, cost_of, model_shape, parts_of
from dta_compile.options import Options
from dta_compile.plan import Limits, PrefixTree
from dta_compile.plan.one_tree import LATENCY, NVLINK, deal_out, schedule_of

BATCHES = ("airline_think", "airline_modprefix", "airline50_think")
DEVICE = DEVICES["h100"]
PATH, PATH_RANKS, PATH_CHUNK = 65_536, 4, 4096  # tokens
SETTINGS: dict[str, tuple[str, int | None]] = {  # model and `memory_budget` in bytes; None: half of what is free
    "1.7B, half of the free memory": ("1.7B", None),
    "8B, half of the free memory": ("8B", None),
    "8B, nothing kept": ("8B", 0),
}
QWEN3 = {
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}

HEAD = f"""\
# One tree over ranks

Simulated: rollouts of agents as one prefix tree over the ranks of a group (`options={{"mesh": group}}`), against a tree
of its own on each rank (`dta_compile.balance`: Algorithm 4 of the paper, or better). Made on {{date}} by

```
python -m benchmarks.balancing.one_tree FOLDER
```

Nothing here was measured on GPUs. **Assumptions**: steps are forward and backward of Qwen3 in bfloat16 with FSDP2 over
all ranks, priced by the roofline of `dta estimate` for an H100 SXM ({{shares}}), launches of kernels included; both
ways get the same memory, and own trees the faster of both sweeps. A rank receives {NVLINK / 1e9:.0f} GB/s and sends as
much at the same time (NVLink within a node, also where there are more than 8 ranks), a message takes
{LATENCY * 1e6:.0f} microseconds; rows that most ranks read are broadcast, which takes as long as to receive them once,
as each rank passes them on; **and nothing that is exchanged is hidden behind computation**. Attention reaches its
share of the peak however short its runs are. The time to gather and reduce parameters, of the optimiser and of planning
is left out: it is equal for both.
"""

BALANCE = """\
## Balance, and what is exchanged

Attention priced, Qwen3-8B, whose states take 4 KiB a token and layer. Tokens run in all are those of the tree, and the
most loaded rank is at most 2% above the mean. Received and sent are tokens whose states are exchanged in a forward of a
layer, each reader counted; backward, their gradients in float32 take the same ways back. Above mean is the most loaded
rank.

| batch | ranks | tree tokens | run in all | above mean | rounds | received, mean | most | sent, most | MB, most |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
STEP = """
## The predicted step

Extra are the tokens that own trees run beyond those of one tree; imbalance is the time of their slowest over the mean;
what is exchanged is part of the time of one tree. "Parts" are equal parts of the ranks with a tree each, sequences
divided over them by `balance`: the fastest of those of 2, 4 and 8 ranks.

| batch | model, memory | ranks | own: extra | imbalance | own: s | one: s | exchange, s | parts / own | one / own |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
MEASURED = "\n## Measured on two gloo ranks\n"
ONE_PATH = f"""
## A path of {PATH:,} tokens

One row over {PATH_RANKS} ranks, Qwen3-8B, nothing kept from forward to backward; peak bytes besides weights and sums of
gradients. A piece is what a rank runs at a time: as long as that of one rank, or so that all ranks together run as many
tokens as one rank. What is above a quarter is the working memory of a piece, and the keys and values of a layer, of
which every rank holds those of the whole path.

| rank | of a piece, at most | tokens | rounds | tokens whose states it holds, a layer | received | GB | of one rank's |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def shape_of(name: str) -> ModelShape:
    """Return the sizes of a Qwen3."""
    config = {**QWEN3[name], "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": name == "1.7B"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return model_shape(folder)


def over(shape: ModelShape, count: int, budget: int | None) -> OverRanks:
    """Return a step over ranks that share a model by FSDP2."""
    options = Options(memory_budget=budget, mesh=tuple(range(count)))
    return OverRanks(Ranks(count, "fsdp"), options, NVLINK, shape, DEVICE)


def balance_rows(name: str, sequences: Sequence[Recorded], shape: ModelShape, counts: Sequence[int]) -> Iterator[str]:
    """Yield rows of the first table."""
    layer = shape.kv_width * BYTES_16BIT  # bytes
    for count in counts:
        _, plan = over(shape, count, 0).one_tree(sequences, 0)
        dealing = plan.dealing
        assert dealing is not None
        dealing.check()
        received, sent = np.array(dealing.received), dealing.traffic.sum((0, 1))
        run, tree = sum(dealing.tokens), plan.stats.tree_tokens
        yield (
            f"| {name} | {count} | {tree:,} | {run:,} | {dealing.imbalance - 1:.3%} | {dealing.rounds} | "
            f"{received.mean():,.0f} | {received.max():,} | {sent.max():,} | {received.max() * layer / 1e6:.1f} |"
        )


def step_rows(name: str, sequences: Sequence[Recorded], setting: str, counts: Sequence[int]) -> Iterator[str]:
    """Yield rows of the second table."""
    model, budget = SETTINGS[setting]
    shape = shape_of(model)
    for count in counts:
        both = over(shape, count, budget)
        own, (one, _) = both.own_trees(sequences), both.one_tree(sequences, 0)
        sizes = [size for size in (2, 4, 8) if size < count and count % size == 0]
        parts = [(both.in_parts(sequences, size).seconds / own.seconds, size) for size in sizes]
        fastest = f"{min(parts)[0]:.2f}, of {min(parts)[1]} ranks" if parts else ""
        yield (
            f"| {name} | {setting} | {count} | {own.tokens / one.tokens - 1:.1%} | {own.imbalance:.3f} | "
            f"{own.seconds:.2f} | {one.seconds:.2f} | {one.exchange:.3f} | {fastest} | "
            f"**{one.seconds / own.seconds:.2f}** |"
        )


def path_rows(shape: ModelShape) -> Iterator[str]:
    """Yield rows of the third table."""
    tree = PrefixTree.build([np.arange(PATH)])
    parts = tuple(part._replace(sums=0.0, reduced=0.0) for part in parts_of(shape, Ranks()))
    limits = Limits(0, cost=cost_of(shape, DEVICE), parts=parts)
    whole = 0.0
    for count, piece in ((1, PATH_CHUNK), (PATH_RANKS, PATH_CHUNK), (PATH_RANKS, PATH_CHUNK // PATH_RANKS)):
        options = Options(chunk_size=piece, memory_budget=0, mesh=tuple(range(count)))
        dealing, kept = deal_out(tree, options, limits, "transparent", count)
        for rank in range(count):
            schedule = schedule_of(dealing, rank, options, "transparent", len(parts), kept)
            size = bytes_of_rank(dealing, rank, schedule, limits)
            whole = whole or size
            yield (
                f"| {rank} of {count} | {piece:,} | {dealing.tokens[rank]:,} | {dealing.rounds} | "
                f"{dealing.held[rank]:,} | {dealing.received[rank]:,} | {size / 1e9:.2f} | {size / whole:.2f} |"
            )


def page(folder: Path, counts: Sequence[int], settings: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the page."""
    shape = shape_of("8B")
    batches = {name: read(str(folder / f"{name}.npz")).sequences for name in BATCHES}
    shares = cost_of(shape, DEVICE).source.split(": ")[1]
    yield HEAD.replace("{date}", date.today().isoformat()).replace("{shares}", shares)
    yield BALANCE
    for name, sequences in batches.items():
        yield from balance_rows(name, sequences, shape, counts)
    yield STEP
    for name, sequences in batches.items():
        for setting in settings:
            yield from step_rows(name, sequences, setting, counts if name == BATCHES[0] else counts[-2:])
    yield ONE_PATH
    yield from path_rows(shape)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of rollout files")
    parser.add_argument("--ranks", default="2,4,8,64", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/ONE_TREE.md"), help="default: %(default)s")
    arguments = parser.parse_args(argv)
    lines = []
    for line in page(arguments.folder, [int(word) for word in arguments.ranks.split(",")], list(SETTINGS)):
        print(line, flush=True)
        lines.append(line)
    # What `one_tree_measured` printed stays at the end.
    _, heading, measured = arguments.output.read_text().partition(MEASURED) if arguments.output.exists() else ("",) * 3
    arguments.output.write_text("\n".join(lines) + "\n" + heading + measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())

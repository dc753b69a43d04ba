"""Measure host time: how long the host works per chunk of a schedule when computation takes almost no time.

    python -m benchmarks.host [--layers 28] [--chunks 512,2048,8192] [--codegen eager,inductor] [--json OUT]

The model has the layers of Qwen3-1.7B with all of their operators but a tiny width. All lengths are divided by 32, so a
chunk "of 2,048 tokens" has 64; host time depends on slices and operators, not on tokens. Attention returns zeros, as a
stand-in for its kernels. One thread. A replay copies inputs and outputs, like a CUDA graph, and runs nothing; the
runtime replays chunks of up to 512 tokens, so replay figures of larger ones are hypothetical. Measured are Python,
dispatch and the planner's arithmetic on the CPU at hand: on a GPU every operator that is no view also costs a launch,
which is added at an assumed price.

The roofline is that of Qwen3-1.7B in bfloat16 on an H100, for forward and backward of one chunk at depth 0: the larger
of the operations at 989 TFLOP/s and the traffic of weights and their float32 gradient sums at 3.35 TB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

import dta_compile
from benchmarks.batches.model import flops
from benchmarks.methods.ours import compile_logprobs
from dta_compile.executable.pieces import Piece
from dta_compile.plan.summary import MeasuredRun
from dta_compile.runtime.attention import choose
from dta_compile.runtime.attention.provider import Operands, Tensors
from dta_compile.runtime.calls.executor import Executor
from dta_compile.runtime.cuda_graphs import arenas

aten = torch.ops.aten
SCALE = 32  # divisor of all lengths
TRUNK, BRANCHES, TWIGS = 2, 6, 4  # chunks on the shared path; chunks below it; sequences that end in each of those
PEAK_FLOPS, BANDWIDTH = 989e12, 3.35e12  # operations and bytes per second, from NVIDIA's data sheet of the H100 SXM
LAUNCH = 3e-6  # assumed host seconds per CUDA launch on top of dispatch; not measured here
NO_KERNEL = {aten._unsafe_view.default, aten.lift_fresh.default, aten.empty_strided.default, aten.detach.default}
QWEN3 = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one chunk size; host times are medians in microseconds per run of a graph.

    Attributes:
        forward, backward: time inside the graphs.
        around: time outside of them per run: rows, inputs, numbers for the device.
        kernels: operators per forward and backward that are no views; generated code counts once per piece.
        views: operators that are views.
        launches: microseconds that launches would add, forward and backward.
        roofline: microseconds of forward and backward of a chunk.
        replayed: fraction of the runs that were replays.
    """

    chunk: int
    layers: int
    codegen: str
    replay: bool
    forward: float
    backward: float
    around: float
    kernels: float
    views: float
    launches: float
    roofline: float
    replayed: float

    @property
    def total(self) -> float:
        """Host microseconds for forward and backward of a chunk."""
        return self.forward + self.backward + 2 * self.around + self.launches


class NoAttention:
    """Attention provider that allocates its results and computes nothing."""

    replayable = True

    def forward(self, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Provider.forward`."""
        _, heads, tokens, _ = x.query.shape
        x.table()
        out = x.query.new_zeros((1, tokens, heads, x.value.shape[-1])).transpose(1, 2)
        return out, x.query.new_zeros((1, heads, tokens), dtype=torch.float32)

    def backward(self, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, x: Operands, *_: Any) -> Tensors:
        """See `Provider.backward`."""
        x.table()
        return tuple(torch.zeros_like(tensor) for tensor in (x.query, x.key, x.value))


class Operators(TorchDispatchMode):
    """Dispatch mode that counts kernels and views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in NO_KERNEL:
            self.counts["views" if func.is_view else "kernels"] += 1
        return func(*args, **(kwargs or {}))


def measure(chunk: int, layers: int, codegen: str, replay: bool, repetitions: int) -> Figures:
    """Measure the host time of a schedule of `TRUNK + BRANCHES` chunks."""
    step, function = _step(chunk // SCALE, layers, codegen)
    with _computing_nothing(replay):
        for _ in range(3):  # compile; run every size once; record every size
            step()
        with _counted() as operators:
            step()
        timed = [_timed(step) for _ in range(repetitions)]
    stats = dta_compile.last_plan(function)
    runs = [run for each in timed for run in each.runs]
    forward, backward = ([run.seconds for run in runs if run.kind == wanted] for wanted in ("forward", "backward"))
    around = [(each.seconds - sum(run.seconds for run in each.runs)) / len(each.runs) for each in timed]
    per_chunk = len(backward) / repetitions
    replays = stats.estimates.replays
    kernels, views = (operators.counts[kind] / per_chunk for kind in ("kernels", "views"))
    return Figures(
        chunk=chunk,
        layers=layers,
        codegen=codegen,
        replay=replay,
        forward=1e6 * statistics.median(forward),
        backward=1e6 * statistics.median(backward),
        around=1e6 * statistics.median(around),
        kernels=kernels,
        views=views,
        launches=1e6 * LAUNCH * (kernels if not replay else 0.0),
        roofline=1e6 * roofline(chunk, layers),
        replayed=replays.replayed / max(stats.stats.launches, 1) if replays else 0.0,
    )


def roofline(tokens: int, layers: int) -> float:
    """Return the seconds of forward and backward of a chunk through Qwen3-1.7B's layers and head on an H100."""
    config = Qwen3Config(**QWEN3, head_dim=128, num_hidden_layers=layers, vocab_size=151_936)
    token, pair = flops(config)
    weights = token / 2
    work = 3 * (token * tokens + pair * tokens * (tokens + 1) / 2) / PEAK_FLOPS
    traffic = weights * (2 + 2 + 2 * 4) / BANDWIDTH  # weights are read twice; gradient sums are read and written
    return max(work, traffic)


@dataclasses.dataclass
class _Timed:
    """Seconds inside executors, and the records of their stopwatches."""

    seconds: float = 0.0
    runs: list[MeasuredRun] = dataclasses.field(default_factory=list)


def _timed(step: Callable[[], None]) -> _Timed:
    measured, run = _Timed(), Executor.run

    def timed(self: Executor, *args: Any, **kwargs: Any) -> Any:
        started, before = time.perf_counter(), len(self.stopwatch.runs)
        try:
            return run(self, *args, **kwargs)
        finally:
            measured.seconds += time.perf_counter() - started
            measured.runs += self.stopwatch.runs[before:]

    with mock.patch.object(Executor, "run", timed):
        step()
    return measured


@contextlib.contextmanager
def _counted() -> Iterator[Operators]:
    operators, run, call = Operators(), Executor.run, Piece.__call__

    def counted(self: Executor, *args: Any, **kwargs: Any) -> Any:
        with operators:
            return run(self, *args, **kwargs)

    def counted_piece(self: Piece, *args: Any) -> Any:
        operators.counts["kernels"] += 1
        return call(self, *args)

    with mock.patch.object(Executor, "run", counted), mock.patch.object(Piece, "__call__", counted_piece):
        yield operators


@contextlib.contextmanager
def _computing_nothing(replay: bool) -> Iterator[None]:
    """Replace attention, and replays of graphs, by stand-ins that compute nothing."""
    with (
        mock.patch.dict(choose.PROVIDERS, {"reference": lambda *_: NoAttention()}),
        mock.patch.object(arenas.ReplayCache, "pays", lambda *_: replay),
        mock.patch.object(arenas.Recorded, "of", _recorded),
    ):
        yield


def _recorded(record: Any, run: Any, tensors: Sequence[torch.Tensor], copied: Sequence[bool]) -> arenas.Recorded:
    """Run a graph once; return a stand-in whose replays only copy inputs and outputs."""
    inputs = [torch.empty_like(tensor) if copy else None for tensor, copy in zip(tensors, copied, strict=True)]
    return arenas.Recorded(inputs, run(list(tensors)), lambda: None)


@functools.lru_cache(maxsize=1)  # shared by the runs with and without replay
def _step(chunk: int, layers: int, codegen: str) -> tuple[Callable[[], None], Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    config = Qwen3Config(**SMALL, head_dim=8, num_hidden_layers=layers, vocab_size=64, use_cache=False)
    model = AutoModelForCausalLM.from_config(config).train()
    options = {"chunk_size": chunk, "strategy": "packed", "verify": "off", "attention": "reference"}
    options |= {"codegen": codegen, "memory_budget": 1 << 40, "cache_dir": "off"}
    name = f"host_{chunk}_{layers}_{codegen}"
    function, _ = compile_logprobs(model, name, "dta", options)
    ids = torch.from_numpy(_sequences(chunk))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        function(ids, labels).sum().backward()

    return step, function


def _sequences(chunk: int) -> np.ndarray[Any, Any]:
    """Return `TRUNK` shared chunks, then `BRANCHES` chunks of which `TWIGS` sequences have a part each."""
    random = np.random.default_rng(0)
    trunk = random.integers(0, 64, TRUNK * chunk)
    return np.stack([np.r_[trunk, random.integers(0, 64, chunk // TWIGS)] for _ in range(BRANCHES * TWIGS)])


COLUMNS = ("chunk", "layers", "code", "replay", "forward", "backward", "around", "kernels", "views", "launches")


def show(rows: list[Figures], console: Console) -> None:
    """Print the figures."""
    table = Table(title="host time per chunk, microseconds", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in (*COLUMNS, "in all", "roofline", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = (row.forward, row.backward, row.around, row.kernels, row.views, row.launches, row.total, row.roofline)
        cells = [f"{row.chunk:,}", str(row.layers), row.codegen, f"{row.replayed:.0%}" if row.replay else "-"]
        table.add_row(*cells, *(f"{value:,.0f}" for value in times), f"{row.total / row.roofline:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers: Callable[[str], list[int]] = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--layers", type=numbers, default=[28], metavar="N,...", help="default: 28")
    parser.add_argument("--chunks", type=numbers, default=[512, 2048, 8192], metavar="TOKENS,...")
    parser.add_argument("--codegen", type=lambda text: text.split(","), default=["eager", "inductor"])
    parser.add_argument("--repetitions", type=int, default=5, help="timed steps (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures to OUT")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(chunk, layers, codegen, replay, arguments.repetitions)
        for layers in arguments.layers
        for codegen in arguments.codegen
        for chunk in arguments.chunks
        for replay in (False, True)
    ]
    show(rows, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

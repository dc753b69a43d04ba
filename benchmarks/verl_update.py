"""Time an actor update in verl on bundled rollouts: verl's FSDP2 engine in several settings, and `strategy=dta`.

    python -m benchmarks.verl_update [--threads 2] [--steps 3] [--layers 4]

One process, one rank (gloo), float32; every round runs one update of each engine, so that all see the same machine. The
first call of each, which compiles ours, is reported separately. Without flash-attn's kernel, as on every CPU, verl
computes log-probs row by row; "vectorised" gives its engine a single `log_softmax`, which is the fairer comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from verl.utils.torch_functional import logprobs_from_logits_naive

import dta_compile
from dta_compile.data import bundled, load_rollouts, vocab_size
from tests.support import verl_cpu
from tests.support.verl_cpu import REFERENCE, Settings, actor_of, data_of, engine_of, update, verl_on_cpu

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
PACKED = Settings(optimizer="AdamW", learning_rate=1e-5)
VECTORISED = "verl.workers.engine.fsdp.transformer_impl.logprobs_from_logits"


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """Engine with its settings, `vectorised` or with verl's own log-probs."""

    name: str
    strategy: str
    settings: Settings
    vectorised: bool = True


class Seconds(NamedTuple):
    """Wall time, and CPU time of all threads, which other load on the machine barely lengthens."""

    wall: float
    processor: float


def with_(**changes: object) -> Settings:
    return dataclasses.replace(PACKED, **changes)


METHODS = (
    Method("dta", "dta", PACKED),
    Method("verl, padding removed, 1 row", REFERENCE, with_(rows=1)),
    Method("verl, padding removed, dynamic, 4,096 tokens", REFERENCE, with_(tokens=4096)),
    Method("verl, padded, 4 rows", REFERENCE, with_(remove_padding=False, rows=4)),
    Method("verl, 1 row, its own log-probs", REFERENCE, with_(rows=1), vectorised=False),
    Method("verl, 1 row, its own log-probs, checkpointing", REFERENCE, with_(checkpointing=True), vectorised=False),
)


def step_of(method: Method, path: str, rollouts: list) -> tuple[Callable[[], Seconds], Any]:
    """Return a function that runs one update, and the engine."""
    with contextlib.redirect_stdout(io.StringIO()):
        engine = engine_of(method.strategy, path, method.settings)
    config = actor_of(REFERENCE, method.settings)

    def run() -> Seconds:
        data = data_of(rollouts, method.settings)
        values = logprobs_from_logits_naive if method.vectorised else None
        patch = mock.patch(VECTORISED, lambda logits, labels, **_: values(logits, labels))
        with patch if values else contextlib.nullcontext():
            start, processor = time.perf_counter(), time.process_time()
            update(engine, data, config)
            return Seconds(time.perf_counter() - start, time.process_time() - processor)

    return run, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--slow-steps", type=int, default=0, help="of methods with verl's own log-probs; 0: their first alone"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--methods", type=int, nargs="*", help="their numbers; default: all")
    arguments = parser.parse_args()
    methods = [METHODS[number] for number in arguments.methods or range(len(METHODS))]
    torch.set_num_threads(arguments.threads)
    rollouts = load_rollouts(bundled(), dense=True)
    with tempfile.TemporaryDirectory() as path, verl_on_cpu():
        verl_cpu.save_model(path, vocab_size(bundled(), 64), **{**SIZES, "num_hidden_layers": arguments.layers})
        steps = {method: step_of(method, path, rollouts) for method in methods}
        first: dict[Method, Seconds] = {}
        times: dict[Method, list[Seconds]] = {method: [] for method in methods}
        for number in range(arguments.steps + 1):
            for method, (run, _) in steps.items():
                if method.vectorised or number <= arguments.slow_steps:
                    seconds = run()
                    print(
                        f"{method.name}: {seconds.wall:.2f} s, {seconds.processor:.2f} s", file=sys.stderr, flush=True
                    )
                    times[method].append(seconds) if number else first.update({method: seconds})
        print(dta_compile.last_plan(steps[methods[0]][1].token_values))
    report(first, times, arguments.threads)


def report(first: dict[Method, Seconds], times: dict[Method, list[Seconds]], threads: int) -> None:
    medians = {
        method: Seconds(*map(statistics.median, zip(*(seconds or [first[method]]), strict=True)))
        for method, seconds in times.items()
    }
    ours = next(iter(medians.values()))  # the first method is the reference
    print(f"{threads} threads, float32, {max(map(len, times.values()))} interleaved updates, medians\n")
    print("| engine | first call | update | dta is faster | processor | dta takes less |\n|---|---|---|---|---|---|")
    for method, median in medians.items():
        ratios = [other / own for other, own in zip(median, ours, strict=True)]
        times_of = f"{first[method].wall:.1f} s | {median.wall:.2f} s | {ratios[0]:.2f}x"
        print(f"| {method.name} | {times_of} | {median.processor:.2f} s | {ratios[1]:.2f}x |")


if __name__ == "__main__":
    main()

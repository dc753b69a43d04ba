"""GPU checks besides speed: equality, no uninitialised reads, no synchronisation, no recompilation.

All run on a small Qwen3 with the head size and grouped heads of the large ones, or on one with experts in place of its
MLPs ("mixture"). Every check takes a device and returns a `Check`; a check that cannot run (an unknown option, a
missing kernel) raises.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

import dta_compile
from benchmarks.batches.model import token_logprobs
from benchmarks.gpu.models import build_on
from benchmarks.gpu_report import Check
from benchmarks.methods.ours import compile_logprobs, replan
from dta_compile import records
from dta_compile.runtime.calls.executor import Executor
from dta_compile.runtime.path.stack import PathStack
from tests.support.helpers import (
    Batch,
    Measurement,
    distances,
    errors,
    make_batch,
    measure,
    reference,
    rollouts,
    rounds_worse,
)
from tests.support.recurrent import no_float32_islands

VOCABULARY = 512
EQUAL = 1e-4  # max |difference| / max |entry| of float32 on the GPU against float64 on the CPU
SAME = 1e-5  # the same bound for equal float32 kernels on padded and unpadded chunks
STRATEGIES, CHUNK_SIZES, BUDGETS = ("packed", "dfs", "vanilla"), (1, 7, 64, 2048), (None, 0)
POISONED = (300, 40, 120)  # lengths; the longest first, as a reused stack keeps its depth
WARM_UP, BATCHES = 5, 20
SERVED = (2, 511, 2048, 4096, 8192, 65_536)  # chunk sizes in tokens


class Trial:
    """Compiled log-probs of a small model on a device, and the same model in float64 on the CPU as reference."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, config: PreTrainedConfig | None = None, **options: Any
    ) -> None:
        self.device = device
        self.model = build_on(device, config or small_config(), dtype)
        self.exact = copy.deepcopy(self.model).cpu().double()
        if self.exact._can_set_experts_implementation():
            self.exact.set_experts_implementation("eager")  # the loop; the others support at most float32
        name = "_".join(["trial", *map(str, options.values())])
        self.function, _ = compile_logprobs(self.model, name, "dta", options)

    def ours(self, batch: Batch) -> Measurement:
        """Return outputs and gradients of the compiled function."""
        return measure(self.function, self.model, batch.to(self.device), loss_of(batch), forward)

    def eager(self, batch: Batch) -> Measurement:
        """Return outputs and gradients of one sequence at a time in the same precision."""
        function = token_logprobs(self.model)
        return reference(self.model, batch.to(self.device), loss_of(batch), lambda _, row: forward(function, row))

    def expected(self, batch: Batch) -> Measurement:
        """Return outputs and gradients of one sequence at a time in float64 on the CPU."""
        function = token_logprobs(self.exact)
        with no_float32_islands():  # of recurrences: they lose precision that a float32 run has
            return reference(self.exact, batch, loss_of(batch), lambda _, row: forward(function, row))


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "use_cache": False,
}


def small_config() -> Qwen3Config:
    """Return a model of two layers with four query heads on two heads of keys and values."""
    return Qwen3Config(**SHAPE)


def small_mixture() -> Qwen3MoeConfig:
    """Return `small_config` with 8 experts, 2 per token."""
    return Qwen3MoeConfig(**SHAPE, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)


def small_recurrent() -> Qwen3NextConfig:
    """Return `small_config` with the gated delta rule and a short convolution in the first of the two layers."""
    delta = {"linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    layers = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1], "num_experts": 0}
    return Qwen3NextConfig(**SHAPE, **delta, **layers, linear_num_key_heads=2)


def forward(function: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return the log-probs `[B, S]` of a batch's labels."""
    return function(batch.ids, batch.extras["labels"], batch.mask)


def loss_of(batch: Batch) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a loss that weights every log-prob differently, so that no errors cancel."""
    weights = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return lambda outputs: (outputs * weights.to(outputs)).sum()


def tree_batch(seed: int, length: int, rows: int = 8) -> Batch:
    """Build sequences of up to `length` tokens, on the CPU, that share prefixes in every way."""
    batch = make_batch(rollouts(VOCABULARY, seed, length)[:rows])
    return batch.with_extras(labels=batch.ids.roll(-1, 1))


def float32_equals_float64(device: torch.device) -> Check:
    """Check all strategies, chunk sizes and budgets in float32; sequences are long where chunks are."""
    trial, worst = Trial(device, torch.float32), {}
    batches = {size: tree_batch(seed, 40 if size < 64 else 300) for seed, size in enumerate(CHUNK_SIZES)}
    expected = {size: trial.expected(batch) for size, batch in batches.items()}
    trial.ours(batches[CHUNK_SIZES[0]])  # replanning needs a compiled graph
    for strategy, size, budget in itertools.product(STRATEGIES, CHUNK_SIZES, BUDGETS):
        replan(trial.function, strategy=strategy, chunk_size=size, memory_budget=budget)
        error_of = errors(trial.ours(batches[size]), expected[size])
        worst[f"{strategy}, chunks of {size}, budget {budget}"] = max(error_of.values())
    return _within("error", worst, EQUAL)


def rounds_as_eager(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, config: PreTrainedConfig | None = None, **options: Any
) -> Check:
    """Check that every error against float64 is at most twice that of one sequence at a time in the same precision."""
    trial, ratios = Trial(device, dtype, config, **options), {}
    for seed, length in ((0, 40), (1, 300), (2, 700)):
        batch = tree_batch(seed, length)
        measured = [run(batch) for run in (trial.ours, trial.eager, trial.expected)]
        ours, theirs = (distances(measurement, measured[2]) for measurement in measured[:2])
        name = max(ours, key=lambda name: ours[name] / theirs[name])
        ratios[f"{name}, {length} tokens"] = ours[name] / theirs[name]
        worse = rounds_worse(*measured)
        if worse:
            return Check(False, f"{len(worse)} of {len(ours)} worse than twice as bad as eager: {worse}", ratios)
    return _within("error over that of eager", ratios, 2.0)


def mixture_equals_float64(device: torch.device) -> Check:
    """Check experts in float32: routes agree with float64 except at ties, so outputs and gradients do."""
    trial, worst = Trial(device, torch.float32, small_mixture()), {}
    trial.ours(tree_batch(0, 40))  # replanning needs a compiled graph
    for seed, size in enumerate((7, 64, 2048)):
        batch = tree_batch(seed, 40 if size < 64 else 300)
        expected = trial.expected(batch)
        for run in range(3):  # CUDA graphs are recorded in the second run and replayed in the third
            replan(trial.function, strategy="packed", chunk_size=size)
            worst[f"chunks of {size}, run {run + 1}"] = max(errors(trial.ours(batch), expected).values())
    return _within("error", worst, EQUAL)


def graphs_equal_eager(device: torch.device) -> Check:
    """Compare runs with and without CUDA graphs, on batches whose shapes recur with other tokens."""
    with_graphs, without = (Trial(device, torch.float32, strategy="packed", cuda_graphs=on) for on in (True, False))
    trials, worst, replayed = (with_graphs, without), {}, 0
    for trial in trials:
        trial.ours(tree_batch(0, 20))  # replanning needs a compiled graph
    for seed, length in enumerate((40, 300, 40, 120, 300, 40)):
        batch = tree_batch(seed, length)
        for size in (64, 2048):
            for trial in trials:
                replan(trial.function, chunk_size=size)
            differences = errors(*(trial.ours(batch) for trial in trials))
            worst[f"batch {seed}, chunks of {size}"] = max(differences.values())
            replays = dta_compile.last_plan(with_graphs.function).estimates.replays
            replayed += replays.replayed if replays else 0
    result = _within("difference", worst, SAME)
    result.text += f"; {replayed} replays"
    return result if replayed or not result.passed else dataclasses.replace(result, passed=None)


def poisoned_memory_is_not_read(device: torch.device) -> Check:
    """Check equality with fresh memory, and the path stack beyond the path, filled with NaN."""
    worst = {}
    with poisoned_stacks():
        trial = Trial(device, torch.float32)
        for seed, length in enumerate(POISONED):
            batch = tree_batch(seed, length)
            expected = trial.expected(batch)
            trial.ours(batch)
            # Graphs are recorded in the second run and replayed in the third; filled memory may rule them out.
            runs = (contextlib.nullcontext, contextlib.nullcontext, contextlib.nullcontext, filled_memory)
            for size, (number, around) in itertools.product((2048, 64), enumerate(runs)):
                replan(trial.function, chunk_size=size)
                with around():
                    error_of = errors(trial.ours(batch), expected)
                worst[f"{length} tokens, chunks of {size}, run {number + 1}"] = max(error_of.values())
    return _within("error", worst, EQUAL)


def no_synchronisation(device: torch.device, config: PreTrainedConfig | None = None) -> Check:
    """Check that no op of a warm schedule makes the host wait for the device."""
    if device.type != "cuda":
        return Check(None, "needs a GPU")
    trial, batch = Trial(device, torch.bfloat16, config, strategy="packed"), tree_batch(0, 300)
    trial.ours(batch)
    guarded = []
    for size in (64, 2048):
        replan(trial.function, chunk_size=size)
        for _ in range(2):
            trial.ours(batch)
        with synchronisation_is_an_error() as runs:
            trial.ours(batch)
        guarded += runs
    return Check(True if guarded else None, f"{len(guarded)} runs of schedules without waiting")


def no_recompilation(device: torch.device) -> Check:
    """Check that batches of other sizes and trees need no compilation after the first few."""
    trial = Trial(device, torch.bfloat16)
    shapes = np.random.default_rng(0).integers((3, 9), (9, 400), (WARM_UP + BATCHES, 2)).tolist()
    before: dict[str, int] = {}
    with triton_compilations() as kernels:
        for seed, (rows, length) in enumerate(shapes):
            if seed == WARM_UP:
                before = compilations(trial.function, kernels)
            trial.ours(tree_batch(seed, length, rows))
        after = compilations(trial.function, kernels)
    new = {name: after[name] - before[name] for name in after}
    text = ", ".join(f"{count} {name}" for name, count in new.items())
    return Check(not any(new.values()), f"{BATCHES} batches: {text} more", {**new, "kernels": kernels})


def generated_code_serves_all_sizes(device: torch.device) -> Check:
    """Check that no piece of generated code falls back to its operators for a chunk size that occurs."""
    if device.type != "cuda":
        return Check(None, "needs a GPU: C++ sums otherwise from 4,096 numbers on")
    trial = Trial(device, torch.bfloat16, codegen="inductor")
    trial.ours(tree_batch(0, 40))
    generated = [engine.executable.joint.generated for engine in records.of(trial.function).engines]
    pieces = {piece: code for code_of_stage in generated for piece, code in code_of_stage.codes.items()}
    served = {size: sum(code.serves(*[size] * piece.source.sizes) for piece, code in pieces.items()) for size in SERVED}
    failed = sum(len(code_of_stage.failures) for code_of_stage in generated)
    text = f"{min(served.values())} of {len(pieces)} pieces for up to {max(SERVED):,} tokens; {failed} not compiled"
    passed = bool(pieces) and not failed and all(count == len(pieces) for count in served.values())
    return Check(passed, text, {str(size): count for size, count in served.items()})


def compilations(function: Any, kernels: Sequence[str]) -> dict[str, int]:
    """Count the compilations so far, by compiler."""
    counters = torch._dynamo.utils.counters
    inductor = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    return {
        "graphs of dta": records.of(function).graphs,
        "frames of Dynamo": counters["frames"]["ok"],
        "graphs of Inductor": sum(counters["inductor"][name] for name in inductor),
        "Triton kernels": len(kernels),
    }


@contextlib.contextmanager
def triton_compilations() -> Iterator[list[str]]:
    """Yield a list that collects the hand-written Triton kernels compiled in the block, one per specialisation."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:
        yield names
        return

    def note(**facts: Any) -> None:
        names.append(str(facts.get("repr", ""))[:100])

    with mock.patch.object(knobs.runtime, "jit_post_compile_hook", note):
        yield names


@contextlib.contextmanager
def synchronisation_is_an_error() -> Iterator[list[str]]:
    """Make device synchronisation inside a schedule raise; around it (planning, the loss) it is allowed.

    Yields a list with an entry for every run of a part of a schedule.
    """
    run, runs = Executor.run, []

    def guarded(self: Executor, *args: Any, **kwargs: Any) -> int:
        runs.append("run")
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(Executor, "run", guarded):
        yield runs


@contextlib.contextmanager
def poisoned_stacks() -> Iterator[None]:
    """Fill every new path stack with NaN."""
    begin = PathStack.__init__

    def begin_poisoned(self: PathStack, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for buffer in (buffer for states in self.states for buffer in states.buffers):
            buffer.fill_(torch.nan)

    with mock.patch.object(PathStack, "__init__", begin_poisoned):
        yield


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Fill uninitialised allocations with NaN, like torch's deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ops without a deterministic implementation
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _within(what: str, worst: dict[str, float], limit: float) -> Check:
    """Return a check that all figures are at most `limit`."""
    name = max(worst, key=lambda name: (worst[name] != worst[name], worst[name]))  # NaN is worst
    wrong = sum(not value <= limit for value in worst.values())
    text = f"largest {what} {worst[name]:.1e} ({name}), limit {limit:g}" + (f"; {wrong} beyond" if wrong else "")
    return Check(not wrong, text, worst)


def _bfloat16(**options: Any) -> Callable[[torch.device], Check]:
    return lambda device: rounds_as_eager(device, **options)


# Ordered by importance.
CHECKS: dict[str, Callable[[torch.device], Check]] = {
    "float32 equals float64": float32_equals_float64,
    "bfloat16 within budget": _bfloat16(),
    "graph replay equals eager": graphs_equal_eager,
    "poisoned memory is not read": poisoned_memory_is_not_read,
    "no synchronisation": no_synchronisation,
    "no recompilation": no_recompilation,
    "generated code serves all sizes": generated_code_serves_all_sizes,
    "mixture: float32 equals float64": mixture_equals_float64,
    "mixture: no synchronisation": lambda device: no_synchronisation(device, small_mixture()),
    "recurrences: float32 within budget": lambda device: rounds_as_eager(device, torch.float32, small_recurrent()),
    "recurrences: bfloat16 within budget": lambda device: rounds_as_eager(device, torch.bfloat16, small_recurrent()),
    "recurrences: no synchronisation": lambda device: no_synchronisation(device, small_recurrent()),
    "bfloat16 within budget, triton": _bfloat16(attention="triton"),
    "bfloat16 within budget, reference": _bfloat16(attention="reference"),
    "bfloat16 within budget, eager code": _bfloat16(codegen="eager"),
    "bfloat16 within budget, compiled code": _bfloat16(codegen="inductor"),
}

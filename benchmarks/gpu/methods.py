"""Methods of `benchmarks.gpu`: forward and backward of a weighted sum of token log-probs of a whole batch.

As in `methods`, data-loader work is done beforehand, and work that depends on shared prefixes inside every step. The
rivals are made as strong as is simple:

* Dense rows run without mask or padding, through the flash kernel of `scaled_dot_product_attention` or cuDNN's, or side
  by side in long rows through torch's kernels for varying lengths.
* Packed trees run FlexAttention by Triton, or by the kernels of flash-attn-4 where that is installed.
* The rivals' log-probs are computed in blocks of rows, each of which goes backward at once, so that the `[S, V]` logits
  of a long row never exist (the vocabulary has 151,936 ids) and nothing is recomputed for that.
* Long rows are as long as fits into memory: an optimistic limit is halved until they do.
* Trees without sharing are sequences packed into rows, so their tree mask is a document mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from benchmarks.batches.model import label_logprobs
from benchmarks.batches.trees import IntArray, count_sequences
from benchmarks.batches.workloads import FloatArray, Workload, tiny
from benchmarks.gpu.models import Limits, Subject, expected_seconds, operations
from benchmarks.measuring.memory import describe
from benchmarks.methods.baselines import merge_into_leaves
from benchmarks.methods.flex_tree import IMPLEMENTATION as TREE_MASK
from benchmarks.methods.flex_tree import Prepared, prepared_trees
from benchmarks.methods.ours import compile_logprobs, forget_replays, replan
from benchmarks.methods.packed_tree import split
from benchmarks.methods.steps import Row, Step, concatenated, fill_rows, rectangle_of, row_of
from benchmarks.methods.varlen import IMPLEMENTATION as SIDE_BY_SIDE
from dta_compile.options import Options

Pair = tuple[IntArray, FloatArray]  # a sequence and the weights of its log-probs

HEAD_ROWS = 2048  # rows per block of log-probs, as many as one of our chunks has
ROW_LIMITS = {False: 32_768, True: 65_536}  # initial tokens per row, without and with checkpointing
LEAST_LIMIT = 4096
PART_TOKENS = 24_576  # tree tokens per micro-batch of `in_parts`
PLANNED = {option: getattr(Options(), option) for option in ("strategy", "chunk_size", "memory_budget")}  # defaults


@dataclasses.dataclass(frozen=True)
class GpuStep(Step):
    """Step that may run only a part of the batch.

    Attributes:
        share: fraction of the batch's operations that `run` performs; times are divided by it.
        warm_up: runs before the first timed step; None: `run`.
    """

    share: float = 1.0
    warm_up: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True)
class GpuMethod:
    """Method of running a step.

    Attributes:
        family: group of the method in plots: "dense", "tree mask" or "dta".
        cost: estimated time of a step, relative to one at the expected efficiency.
        build: maps a model and a batch to a step.
    """

    name: str
    family: str
    description: str
    cost: float
    build: Callable[[Subject, Workload, Limits], GpuStep]


def dense(
    subject: Subject, workload: Workload, limits: Limits, recompute: bool = False, kernel: SDPBackend | None = None
) -> GpuStep:
    """Run one sequence at a time; only every n-th by length if the batch would take too long."""
    return _one_by_one(subject, workload.pairs, limits, recompute, kernel)


def leaves(subject: Subject, workload: Workload, limits: Limits) -> GpuStep:
    """Run one sequence at a time with checkpointing, leaving out prefixes of others."""
    pairs = merge_into_leaves(workload.sequences, workload.weights)
    step = _one_by_one(subject, pairs, limits, recompute=True)
    return dataclasses.replace(step, note=lambda: f"{len(pairs)} leaves; {step.note()}".rstrip("; "))


def _chosen(subject: Subject, pairs: list[Pair], limits: Limits) -> tuple[list[Pair], float, str]:
    """Choose the longest of weighted sequences and every n-th; return them, their share of operations, and a note."""

    def amount(some: list[Pair]) -> float:
        return operations(subject.config, count_sequences([sequence for sequence, _ in some]), tree=False)

    stride = max(math.ceil(expected_seconds(amount(pairs)) / limits.dense_seconds), 1)
    chosen = sorted(pairs, key=lambda pair: -len(pair[0]))[::stride]
    note = f"{len(chosen)} of {len(pairs)} sequences, scaled by operations" if stride > 1 else ""
    return chosen, amount(chosen) / amount(pairs), note


def _one_by_one(
    subject: Subject, pairs: list[Pair], limits: Limits, recompute: bool, kernel: SDPBackend | None = None
) -> GpuStep:
    """Build a step over weighted sequences. It always contains the longest, for peak memory, and warms up with it."""
    chosen, share, note = _chosen(subject, pairs, limits)
    rows = [_on(subject.device, row_of(*pair)) for pair in chosen]
    return GpuStep(
        run=lambda: _backward_rows(subject.model, rows, recompute, kernel),
        note=lambda: note,
        share=share,
        warm_up=lambda: _backward_rows(subject.model, rows[:1], recompute, kernel),
    )


def varlen(subject: Subject, workload: Workload, limits: Limits, recompute: bool = False) -> GpuStep:
    """Run sequences side by side in rows as long as fit into memory, which attention treats separately."""
    chosen, share, note = _chosen(subject, workload.pairs, limits)
    fitted = LongRows(recompute)

    def rows() -> list[list[Pair]]:
        groups = fill_rows([sequence for sequence, _ in chosen], fitted.limit)
        return [[chosen[index] for index in group] for group in groups]

    return GpuStep(
        run=lambda: fitted.run(subject, lambda: _backward_side_by_side(subject.model, rows(), recompute)),
        note=lambda: "; ".join(filter(None, [fitted.note(len(rows())), note])),
        share=share,
    )


class LongRows:
    """Length of rows that fit into memory, and whether FlexAttention is compiled for every length."""

    def __init__(self, recompute: bool) -> None:
        self.limit, self.static = ROW_LIMITS[recompute], False

    def run(self, subject: Subject, backward: Callable[[], None], is_compiled: bool = False) -> None:
        """Run a step, with shorter rows after it ran out of memory, and compiled anew after an error of a compiler."""
        while True:
            subject.model.zero_grad(set_to_none=True)
            try:
                return backward()
            except torch.OutOfMemoryError:
                if self.limit <= LEAST_LIMIT:
                    raise
                self.limit //= 2
            except Exception:  # compiler errors, possibly over symbolic sizes
                if self.static or not is_compiled:
                    raise
                self.static = True
            release_memory()

    def note(self, rows: int) -> str:
        text = f"{rows} rows of up to {self.limit:,} tokens" if rows > 1 else "one row"
        return text + ("; compiled for every length" if self.static else "")


def tree_mask(
    subject: Subject, workload: Workload, limits: Limits, recompute: bool = False, kernels: str = "AUTO"
) -> GpuStep:
    """Run the prefix tree in rows as long as fit into memory, with FlexAttention under an ancestor mask."""
    fitted = LongRows(recompute)

    def backward() -> None:
        _backward_trees(subject.model, workload, fitted.limit, recompute, fitted.static, kernels)

    return GpuStep(
        run=lambda: fitted.run(subject, backward, is_compiled=True),
        note=lambda: fitted.note(len(split(workload.sequences, fitted.limit))),
    )


def ours(
    subject: Subject,
    workload: Workload,
    limits: Limits,
    compiled_with: dict[str, Any] | None = None,
    **planned_with: Any,
) -> GpuStep:
    """Run `torch.compile(..., backend="dta")`; one compilation serves all batches and planning options."""
    function, note = compiled_log_probs(subject, compiled_with or {})
    ids, labels, weights, mask = _on(subject.device, rectangle_of(workload))

    def run() -> None:
        replan(function, **{**PLANNED, **planned_with})
        (weights * function(ids, labels, mask)).sum().backward()

    def warm_up() -> None:
        for _ in range(2):  # CUDA graphs are recorded in the second step
            run()
            subject.model.zero_grad(set_to_none=True)

    return GpuStep(run, note, warm_up=warm_up)


def in_parts(subject: Subject, workload: Workload, limits: Limits) -> GpuStep:
    """Run `ours` in micro-batches of neighbouring sequences, whose activations fit where the batch's do not."""
    function, _ = compiled_log_probs(subject, {})
    tensors = _on(subject.device, rectangle_of(workload))
    groups = split(workload.sequences, PART_TOKENS)
    parts = [tuple(tensor[group] for tensor in tensors) for group in groups]

    def run() -> None:
        replan(function, **PLANNED)
        for ids, labels, weights, mask in parts:
            (weights * function(ids, labels, mask)).sum().backward()

    return GpuStep(run, lambda: f"{len(parts)} parts of up to {PART_TOKENS:,} tokens of a tree")


def clean(subject: Subject) -> None:
    """Drop gradients and the memory of CUDA graphs, so that the next method starts without them."""
    subject.model.zero_grad(set_to_none=True)
    for compiled in subject.compiled.values():
        if not isinstance(compiled, str):
            forget_replays(compiled[0])
    release_memory()


def compiled_log_probs(subject: Subject, options: dict[str, Any]) -> tuple[Any, Callable[[], str]]:
    """Return the compiled function under test, already called on a tiny batch; it is compiled once per subject.

    Raises:
        RuntimeError: an earlier compilation failed.
    """
    key = tuple(sorted(options.items()))
    if key not in subject.compiled:
        try:
            subject.compiled[key] = _compiled(subject, options)
        except Exception as error:
            subject.compiled[key] = describe(error)  # the error object would keep tensors alive
            raise
    if isinstance(subject.compiled[key], str):
        raise RuntimeError(f"not compiled: {subject.compiled[key]}")
    return subject.compiled[key]


def _compiled(subject: Subject, options: dict[str, Any]) -> tuple[Any, Callable[[], str]]:
    name = "_".join(["ours", *(f"{option}_{value}" for option, value in options.items())])
    function, note = compile_logprobs(subject.model, name, "dta", options)
    ids, labels, weights, mask = _on(subject.device, rectangle_of(tiny(subject.config.vocab_size)))
    (weights * function(ids, labels, mask)).sum().backward()
    subject.model.zero_grad(set_to_none=True)
    return function, note


def release_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _backward_rows(model: PreTrainedModel, rows: list[Row], recompute: bool, kernel: SDPBackend | None) -> None:
    is_chosen = kernel is not None and model.device.type == "cuda"
    with _arranged(model, "sdpa", recompute), sdpa_kernel(kernel) if is_chosen else contextlib.nullcontext():
        for ids, labels, weights in rows:
            # No mask, where transformers would look for one: the flash kernel is causal by itself.
            hidden = model.model(ids, attention_mask={"full_attention": None}).last_hidden_state
            _backward_head(model, hidden[0], labels[0], weights[0])


def _backward_side_by_side(model: PreTrainedModel, rows: list[list[Pair]], recompute: bool) -> None:
    with _arranged(model, SIDE_BY_SIDE, recompute):
        for pairs in rows:
            row, lengths = concatenated(pairs)
            ids, labels, weights = _on(model.device, row)
            own = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(model.device)}
            own |= {"attention_mask": {"full_attention": None}, "sequence_lengths": lengths}
            hidden = model.model(ids, **own).last_hidden_state
            _backward_head(model, hidden[0], labels[0], weights[0])


def _backward_trees(
    model: PreTrainedModel, workload: Workload, limit: int, recompute: bool, static: bool, kernels: str
) -> None:
    many = torch._dynamo.config.patch(recompile_limit=64)  # static sizes compile once per size
    with _arranged(model, TREE_MASK, recompute), many:
        for tree in prepared_trees(workload.sequences, workload.weights, limit, model.device, static, kernels):
            _backward_tree(model, tree)


def _backward_tree(model: PreTrainedModel, tree: Prepared) -> None:
    no_mask = {"full_attention": None}  # the tree mask is an argument of the attention function
    own = {"tree_mask": tree.mask, "flex": tree.flex}
    hidden = model.model(tree.tokens, attention_mask=no_mask, position_ids=tree.depths, **own).last_hidden_state
    _backward_head(model, hidden[0].index_select(0, tree.parents), tree.labels, tree.weights)


def _backward_head(model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
    """Run the backward pass of the weighted log-probs of `labels` `[T]`, predicted from `hidden` `[T, D]`."""
    parts = [part.detach().requires_grad_() for part in hidden.split(HEAD_ROWS)]
    for part, label, weight in zip(parts, labels.split(HEAD_ROWS), weights.split(HEAD_ROWS), strict=True):
        (weight * label_logprobs(model.lm_head(part), label)).sum().backward()
    hidden.backward(torch.cat([part.grad for part in parts]))


@contextlib.contextmanager
def _arranged(model: PreTrainedModel, attention: str, recompute: bool) -> Iterator[None]:
    """Temporarily set the attention function of a model, and checkpointing of every layer.

    The public method for checkpointing leaves a hook behind, which would make other methods recompile.
    """
    store = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    model._set_gradient_checkpointing(enable=recompute, gradient_checkpointing_func=store)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model._set_gradient_checkpointing(enable=False)


def _on(device: torch.device, tensors: tuple[torch.Tensor, ...]) -> Any:
    return tuple(tensor.to(device) for tensor in tensors)


def _ours(name: str, description: str, cost: float, compiled_with: dict[str, Any], **planned_with: Any) -> GpuMethod:
    build = functools.partial(ours, compiled_with=compiled_with, **planned_with)
    return GpuMethod(name, "dta", description, cost, build)


def _rivals(
    name: str, family: str, description: str, cost: float, build: Callable[..., GpuStep], **settings: Any
) -> list[GpuMethod]:
    """Return a rival with all layers checkpointed, and without."""
    return [
        GpuMethod(
            name + "-ckpt" * recompute,
            family,
            description + ", checkpointed" * recompute,
            cost * (4 / 3 if recompute else 1),
            functools.partial(build, recompute=recompute, **settings),
        )
        for recompute in (True, False)
    ]


_recomputed = functools.partial(dense, recompute=True)

# In order of execution: methods that the acceptance lines need come first.
METHODS: dict[str, GpuMethod] = {
    method.name: method
    for method in (
        GpuMethod("checkpoint", "dense", "one sequence at a time, layers checkpointed", 4 / 3, _recomputed),
        _ours("auto", "all options at their defaults", 1, {}),
        *_rivals("tree-mask", "tree mask", "packed tree, FlexAttention", 1.5, tree_mask),
        *_rivals("tree-flash", "tree mask", "packed tree, FlexAttention by FA4", 1, tree_mask, kernels="FLASH"),
        GpuMethod("dense", "dense", "one sequence at a time", 1, dense),
        *_rivals(
            "cudnn", "dense", "one sequence at a time, cuDNN's kernel", 1, dense, kernel=SDPBackend.CUDNN_ATTENTION
        ),
        *_rivals("varlen", "dense", "sequences side by side, torch's varlen kernels", 1, varlen),
        _ours("auto-0", "nothing kept from forward to backward", 4 / 3, {}, memory_budget=0),
        _ours("auto-2048", "chunks of 2,048 tokens", 1, {}, chunk_size=2048),
        _ours("auto-4096", "chunks of 4,096 tokens", 1, {}, chunk_size=4096),
        _ours("auto-8192", "chunks of 8,192 tokens", 1, {}, chunk_size=8192),
        GpuMethod("auto-parts", "dta", "in micro-batches, so that nothing is computed twice", 1, in_parts),
        GpuMethod("leaves", "dense", "no sequence that is a prefix of another, layers checkpointed", 1, leaves),
    )
}
ON_LOW_SHARING = (
    "auto",
    "auto-parts",
    "tree-mask-ckpt",
    "tree-mask",
    "dense",
    "checkpoint",
    "cudnn",
    "varlen",
)  # few sequences are prefixes of others there
# Value of single parts; each is compiled separately.
ABLATIONS: dict[str, GpuMethod] = {
    method.name: method
    for method in (
        _ours("no-graphs", "without CUDA graphs", 1, {"cuda_graphs": False}),
        _ours("eager-code", "chunk graphs run operator by operator", 1.5, {"codegen": "eager"}),
        _ours("triton", "attention by our Triton kernels", 1, {"attention": "triton"}),
    )
}

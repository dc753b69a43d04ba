"""Time the attention of one chunk on a GPU, by provider and by block sizes of our kernels (`--part attention`).

Two query heads per head of keys and values, head size 128, bfloat16. TFLOP/s count two products of every query with
every key that it reads in the forward pass and five in the backward pass, whatever a kernel recomputes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_report import Check
from dta_compile.errors import OptionError
from dta_compile.ops.scoring import Scoring
from dta_compile.plan import Segment
from dta_compile.runtime.attention import triton
from dta_compile.runtime.attention.choose import provider_of
from dta_compile.runtime.attention.provider import Operands, Provider
from dta_compile.runtime.path.chunk_shape import ChunkShape
from tests.support.attention import attention_layer

HEADS, KV_HEADS, WIDTH = 16, 8, 128
RUNS = 10
PROVIDERS = ("triton", "reference")
VARIANTS = {  # block sizes: queries, keys, warps, stages
    "forward": [(128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 32, 8, 4)],
    "query": [(128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3)],
    "key": [(64, 128, 8, 1), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3)],
}


def shapes(scale: int) -> dict[str, ChunkShape]:
    """Return a long run, a long run at depth, and many short branches of one prefix; sizes are multiples of `scale`."""
    branches = [Segment(i * scale, (i + 1) * scale, (i + 1) * scale, 16 * scale, -1) for i in range(16)]
    return {
        "a run": ChunkShape.run(0, 16 * scale),
        "a run deep down": ChunkShape.run(32 * scale, 16 * scale),
        "branches": ChunkShape.of(16 * scale, 0, branches),
    }


def attention(device: torch.device) -> Check:
    """Measure every available provider, and our kernels with other block sizes."""
    on_gpu = device.type == "cuda"
    figures: dict[str, Any] = {}
    for name, shape in shapes(256 if on_gpu else 2).items():
        x, grad = _operands(shape, device)
        pairs = shape.tokens * shape.start + int(shape.allowed(range(shape.tokens), range(shape.tokens)).sum())
        work = 2 * pairs * HEADS * WIDTH / 1e12  # per product
        for variant, provider in _variants(device):
            try:
                forward, backward = _seconds(provider, x, grad)
            except Exception as error:  # block sizes that do not fit
                figures[f"{name}, {variant}"] = type(error).__name__
            else:
                figures[f"{name}, {variant}"] = [round(2 * work / forward, 1), round(5 * work / backward, 1)]
    lines = [f"{name}: {rates}" for name, rates in figures.items()]
    return Check(on_gpu or None, "TFLOP/s of forward and backward: " + "; ".join(lines), figures)


def _variants(device: torch.device) -> Iterator[tuple[str, Provider]]:
    """Yield providers by name; ours again under each variant of block sizes."""
    layer = attention_layer(KV_HEADS, WIDTH, WIDTH, torch.bfloat16)
    for name in PROVIDERS:
        try:
            provider = provider_of(layer, device, name)
        except OptionError:
            continue
        yield name, provider
        if name == "triton":
            for rule, sizes in VARIANTS.items():
                for size in sizes:
                    with mock.patch.object(triton, f"_{rule}_blocks", lambda *_, size=size: triton.Blocks(*size)):
                        yield f"{name} with {rule} blocks {size}", provider


def _operands(shape: ChunkShape, device: torch.device) -> tuple[Operands, torch.Tensor]:
    def random(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, WIDTH, dtype=torch.bfloat16, device=device)

    tokens = (random(heads, shape.tokens) for heads in (HEADS, KV_HEADS, KV_HEADS))
    above = (random(KV_HEADS, shape.start) for _ in range(2))
    x = Operands(*tokens, *above, shape, lambda: shape.table(device), Scoring(WIDTH**-0.5), None)
    return x, random(HEADS, shape.tokens)


def _seconds(provider: Provider, x: Operands, grad: torch.Tensor) -> tuple[float, float]:
    out, logsumexp = provider.forward(x)
    above = [torch.zeros(value.shape, device=value.device) for value in (x.prefix_key, x.prefix_value)]
    runs = (lambda: provider.forward(x), lambda: provider.backward(grad, out, logsumexp, x, *above))
    forward, backward = (_median(run, x.query.device) for run in runs)
    return forward, backward


def _median(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a run, after one that may compile."""
    times = []
    for _ in range(1 + RUNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


KERNELS: dict[str, Callable[[torch.device], Check]] = {"chunk": attention}

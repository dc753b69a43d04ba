"""How many tokens a chunk has where nobody says."""

import pytest
import torch

import dta_compile
from dta_compile.runtime.calls import planned_call
from dta_compile.runtime.measure.budget import default_chunk_tokens
from tests.support.tiny import TinyLM, shared_ids

GPU, CPU = torch.device("cuda"), torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("device", "budget", "bytes_per_token", "expected"),
    [
        (CPU, 40 * GIB, 1.0, 2048),
        (GPU, 40 * GIB, 2**20, 8192),
        (GPU, 40 * GIB, 2 * 2**20, 4096),
        (GPU, 40 * GIB, 8 * 2**20, 2048),
        (GPU, 0, 2**20, 2048),  # keep nothing: as little memory as possible
    ],
)
def test_chunks_are_larger_on_a_gpu_with_room(device, budget, bytes_per_token, expected):
    assert default_chunk_tokens(device, budget, bytes_per_token) == expected


def test_the_plan_says_how_large_chunks_are(monkeypatch):
    monkeypatch.setattr(planned_call, "default_chunk_tokens", lambda *_: 7)
    compiled = torch.compile(TinyLM(layers=1), backend="dta")
    compiled(shared_ids())
    plan = dta_compile.last_plan(compiled)
    assert plan.schedule.chunk_size == 7 and "chunk_size 7" in str(plan)

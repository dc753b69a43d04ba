"""How many tokens a chunk may have where nobody says."""

import pytest
import torch

import dta_compile
from dta_compile.plan.cost import chunk_sizes
from dta_compile.runtime.calls import planned_call
from dta_compile.runtime.measure import budget
from tests.support.tiny import TinyLM, shared_ids

GIB = 2**30


@pytest.mark.parametrize(
    ("budget", "bytes_per_token", "expected"),
    [
        (40 * GIB, 2**20, (2048, 4096, 8192, 16_384)),
        (38 * GIB, 2 * 2**20, (2048, 4096)),
        (40 * GIB, 8 * 2**20, (2048,)),
        (0, 2**20, (2048,)),  # keep nothing: as little memory as possible
    ],
)
def test_chunks_are_larger_where_there_is_room(budget, bytes_per_token, expected):
    assert chunk_sizes(budget, bytes_per_token) == expected


def test_chunks_are_smaller_where_their_activations_would_be_no_small_share_of_what_is_held():
    by_boundaries = {2**32: (2048, 4096, 8192), 2**30: (2048,), 2**29: (1024, 2048), 2**25: (256, 512, 1024, 2048)}
    assert {size: chunk_sizes(0, 2**17, boundaries=size) for size in by_boundaries} == by_boundaries
    assert chunk_sizes(2**30, 2**17, boundaries=0) == (2048,)
    assert chunk_sizes(0, 2**17, boundaries=2**25, tokens=2049) == (1024, 2048)  # and are few


def test_the_plan_says_how_large_chunks_are(monkeypatch):
    monkeypatch.setattr(planned_call, "chunk_sizes", lambda *_: (7,))
    compiled = torch.compile(TinyLM(layers=1), backend="dta")
    compiled(shared_ids())
    plan = dta_compile.last_plan(compiled)
    assert plan.schedule.chunk_size == 7 and "chunk_size 7" in str(plan)


def test_gradients_that_will_be_summed_are_not_given_away(monkeypatch):
    """A model of 8 billion parameters ran out of an H100's memory with half of what was free before its backward."""
    monkeypatch.setattr(budget, "free_bytes", lambda device: 63 * GIB)
    assert budget.default_budget(torch.device("cuda"), taken=32 * GIB) == 31 * GIB // 2
    assert budget.default_budget(torch.device("cuda"), taken=64 * GIB) == 0
    seen = []
    monkeypatch.setattr(planned_call, "default_budget", lambda device, taken=0: seen.append(taken) or GIB)
    model = TinyLM(layers=1)
    torch.compile(model, backend="dta")(shared_ids())
    assert set(seen) == {sum(parameter.nbytes for parameter in model.parameters())}

"""The cache of analysed programs: a hit is a miss but for its time, and nothing that could differ is a hit.

What another process does is done here by compiling anew; one test has another process.
"""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import dta_compile
from dta_compile.passes.axes import token_rules
from dta_compile.program_cache import cache, description, files
from tests.support.inside import inside
from tests.support.tiny import (
    PACKED_IDS,
    SEGMENTS,
    SMALL_CHUNKS,
    StatedLM,
    TinyLM,
    after,
    shared_ids,
    weighted,
)

IDS = shared_ids()
MASK = torch.ones(5, 9, dtype=torch.bool)
MASK[1, 6:] = MASK[3, 8:] = False


class SmallLM(TinyLM):
    """One layer, and what attributes of the model say."""

    def __init__(self):
        super().__init__(layers=1)
        self.scale, self.function = 1.0, torch.tanh

    def forward(self, ids, mask=None):
        return self.function(super().forward(ids, mask) * self.scale)


class OfTwoBatches(SmallLM):
    """Batches of different sizes in one function, and a tensor made of Python's numbers."""

    def forward(self, ids, others):
        table = torch.tensor([0.25, 0.5, 2.0] * 11, dtype=torch.float64)[:31]
        return torch.cat([(super(OfTwoBatches, self).forward(one) * table).flatten() for one in (ids, others)])


class OfCodebooks(SmallLM):
    """Ids `[B, S, K]`: the passes make K a constant, under a guard."""

    def forward(self, ids, mask=None):
        x = self.embedding(ids).sum(2)
        for block in self.blocks:
            x = block(x, None)
        return self.head(self.norm(x))


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """The folder of programs, in use."""
    monkeypatch.setattr(cache, "open_folder", files.open_folder)
    return tmp_path / "programs"


@pytest.fixture
def compiled(tmp_path):
    """Compiles as a new process would."""

    def compile_anew(model, **options):
        torch._dynamo.reset()
        options = {**SMALL_CHUNKS, "cache_dir": tmp_path, "verify": "off", **options}
        return torch.compile(model, backend="dta", options=options)

    return compile_anew


def was_found(compiled):
    return cache.FOUND in inside(compiled).newest.program.timings


def step(compiled, model, *args, real=None):
    """Outputs where they are of real tokens, and gradients."""

    def run():
        out = compiled(*args)
        out = out if real is None else torch.where(real[..., None], out, 0)
        weighted(out).backward()
        return out.detach()

    out, found = after(model, run)
    return {"out": out, **found}


def assert_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert (actual[name] is expected[name] is None) or torch.equal(actual[name], expected[name]), name


# Hits

CASES = {
    "padded": (SmallLM, (IDS, MASK), MASK),
    "stated": (StatedLM, (PACKED_IDS, SEGMENTS), SEGMENTS > 0),
    "two batches": (OfTwoBatches, (IDS, shared_ids(3, 7, seed=3)), None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_that_was_found_does_what_the_analysed_one_does(case, compiled):
    make, args, real = CASES[case]
    model = make()
    first = compiled(model, verify="auto")
    expected = step(first, model, *args, real=real)
    assert not was_found(first)
    second = compiled(model, verify="auto")
    actual = step(second, model, *args, real=real)
    assert was_found(second)
    assert_bits(actual, expected)
    known, found = (dta_compile.last_plan(one) for one in (first, second))
    assert found.schedule == known.schedule
    assert found.estimates.self_check is not None
    reports = [dta_compile.explain(one, *args) for one in (first, second)]
    assert reports[0].regions == reports[1].regions and reports[0].attention == reports[1].attention
    assert reports[0].prefix_key == reports[1].prefix_key and reports[0].frontier == reports[1].frontier


def test_another_process_finds_it(tmp_path):
    code = """if True:
    import sys, torch
    torch.set_num_threads(1)
    from tests.program_cache import test_cache as test
    model = test.SmallLM()
    compiled = torch.compile(model, backend="dta", options={**test.SMALL_CHUNKS, "cache_dir": sys.argv[1]})
    found = test.step(compiled, model, test.IDS, test.MASK, real=test.MASK)
    torch.save((found, test.was_found(compiled)), sys.argv[2])
    """
    results = []
    for name in ("first", "second"):
        command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / name)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        results.append(torch.load(tmp_path / name))
    (expected, found), (actual, found_again) = results
    assert (found, found_again) == (False, True)
    assert_bits(actual, expected)


def test_first_sizes_may_be_others(compiled):
    model = SmallLM()
    step(compiled(model), model, IDS)
    ids = shared_ids(3, 12, seed=2)
    second = compiled(model)
    actual = step(second, model, ids)
    assert was_found(second)
    torch.testing.assert_close(actual, step(model, model, ids))


def test_guards_that_passes_left_are_made_again(compiled):
    """Without them, the program for two codebooks would run for three."""
    model = OfCodebooks()
    two, three = torch.stack([IDS, IDS.flip(1)], -1), torch.stack([IDS, IDS.flip(1), IDS], -1)
    first = compiled(model)
    step(first, model, two)
    second = compiled(model)
    torch.testing.assert_close(step(second, model, two), step(model, model, two))
    assert was_found(second)
    torch.testing.assert_close(step(second, model, three), step(model, model, three))
    assert len(inside(second).engines) == 2
    third = compiled(model)
    torch.testing.assert_close(step(third, model, three), step(model, model, three))
    assert was_found(third)  # that of the call before
    fourth = compiled(model)
    torch.testing.assert_close(step(fourth, model, two), step(model, model, two))
    assert not was_found(fourth)  # its file holds the program for three


def test_pieces_of_generated_code_are_kept(compiled, monkeypatch):
    model, bodies = SmallLM(), []

    def interpreted(body, symbols, inputs):
        bodies.append((body.code, [str(one) for one in symbols], [(one.dtype, str(one.shape)) for one in inputs]))
        raise RuntimeError("no compiler")

    monkeypatch.setattr("dta_compile.passes.fusion.codegen.generate", interpreted)
    first = compiled(model, codegen="inductor")
    expected, pieces = step(first, model, IDS), list(bodies)
    bodies.clear()
    second = compiled(model, codegen="inductor")
    assert_bits(step(second, model, IDS), expected)
    assert was_found(second)
    assert bodies == pieces and pieces
    graphs = inside(second).newest.program.joint
    assert {*graphs.generated.pieces["forward"]} == {
        node.target for node in graphs.forward.graph.nodes if node.target in graphs.generated.pieces["forward"]
    }


# Misses


def _half(model):
    model.scale = 0.5


def _other_function(model):
    model.function = torch.sigmoid


CHANGES = {
    "a constant": (_half, {}),
    "a function": (_other_function, {}),
    "a dtype": (lambda model: model.float(), {}),
    "frozen weights": (lambda model: model.head.requires_grad_(False), {}),
    "an option": (lambda model: None, {"skip_passes": ["in_place"]}),
}


def test_whatever_the_passes_read_is_compared(compiled, monkeypatch):
    def is_found(change=lambda model: None, **options):
        model = SmallLM()
        change(model)
        again = compiled(model, **options)
        again(IDS)
        return was_found(again)

    assert not is_found()
    assert is_found()
    found = {name: is_found(change, **options) for name, (change, options) in CHANGES.items()}
    assert found == dict.fromkeys(CHANGES, False)
    with torch.no_grad():
        assert not is_found()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_found()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.1")
        assert not is_found()
    with monkeypatch.context() as patch:
        patch.setattr(description, "our_source", lambda: "other code")
        assert not is_found()
    assert is_found()

"""The executable is plain data: nothing of a compiler is in it, and as a pickle it runs as before."""

import io
import pickle

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dta_compile.errors import RefusalError
from dta_compile.passes import Program
from dta_compile.runtime.calls.call import Sizes
from tests.support import recurrent
from tests.support.inside import inside
from tests.support.tiny import PACKED_IDS, SEGMENTS, SMALL_CHUNKS, BareLM, StatedLM, TinyLM, after, shared_ids, weighted

IDS = shared_ids()
MASK = torch.ones(5, 9, dtype=torch.bool)
MASK[1, 6:] = MASK[3, 8:] = False
OF_A_COMPILER = (fx.Node, fx.Graph, fx.GraphModule, FakeTensor, FakeTensorMode, ShapeEnv, Program, torch.SymInt)


class OfTwoBatches(BareLM):
    """Batches of different sizes in one function, and a table of numbers."""

    def forward(self, ids, others):
        table = torch.tensor([0.25, 0.5, 2.0] * 11, dtype=torch.float64)[:31]
        return torch.cat([(super(OfTwoBatches, self).forward(one) * table).flatten() for one in (ids, others)])


class OfTransformers(torch.nn.Module):
    """Logits of a model with convolutions, recurrences, attention and experts."""

    def __init__(self, name):
        super().__init__()
        self.model = recurrent.build(name)

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


CASES = {
    "padded": (TinyLM, (IDS, MASK), MASK),
    "packed": (StatedLM, (PACKED_IDS, SEGMENTS), SEGMENTS > 0),
    "several batches": (OfTwoBatches, (IDS, shared_ids(3, 7, seed=3)), None),
    "recurrent, with experts": (lambda: OfTransformers("qwen3_next_experts"), (IDS + 1,), None),
}


class Walker(pickle.Pickler):
    """Raises at what only a compiler knows."""

    def reducer_override(self, value):
        assert not isinstance(value, OF_A_COMPILER), f"{type(value).__name__}: {value}"
        return NotImplemented


def walked(executable):
    stream = io.BytesIO()
    Walker(stream).dump(executable)
    return stream.getvalue()


def step(compiled, model, args, real):
    def run():
        out = compiled(*args)
        out = out if real is None else torch.where(real[..., None], out, 0)
        weighted(out).backward()
        return out.detach()

    out, found = after(model, run)
    return {"out": out, **found}


def replace(engine, executable):
    """Run another executable from now on."""
    engine.executable, engine.sizes, engine.checked = executable, Sizes(executable.symbols), False
    if engine.rest is not None:
        replace(engine.rest, executable.rest)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("recurrent") else name for name in CASES]
)
def test_a_pickled_executable_does_the_same(case):
    torch._dynamo.reset()
    make, args, real = CASES[case]
    model = make()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    expected = step(compiled, model, args, real)
    engine = inside(compiled).only
    data = walked(engine.executable)
    replace(engine, pickle.loads(data))
    found = step(compiled, model, args, real)
    assert inside(compiled).only is engine
    for name, value in expected.items():
        assert (value is found[name] is None) or torch.equal(value, found[name]), name


def test_a_streaming_step_goes_by_data_alone():
    import dta_compile

    torch._dynamo.reset()
    model = BareLM()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)

    def run():
        return dta_compile.streaming_step(compiled, lambda row, logits: weighted(logits), IDS)

    expected = after(model, run)
    engine = inside(compiled).only
    replace(engine, pickle.loads(walked(engine.executable)))
    found = after(model, run)
    assert found[0] == expected[0]
    assert all(torch.equal(value, found[1][name]) for name, value in expected[1].items())


def test_what_rows_cannot_be_told_apart_for_is_data_as_well():
    import dta_compile

    torch._dynamo.reset()
    model = BareLM()
    compiled = torch.compile(lambda ids: model(ids).mean(0), backend="dta", options=SMALL_CHUNKS)
    weighted(compiled(IDS)).backward()
    engine = inside(compiled).only
    replace(engine, pickle.loads(walked(engine.executable)))
    with pytest.raises(RefusalError, match=r"test_executable.py(.|\n)*mean"):
        dta_compile.streaming_step(compiled, lambda row, out: out.sum(), IDS)

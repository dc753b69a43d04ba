"""Chunks replayed as CUDA graphs are, on a CPU: at fixed addresses, padded, by numbers in device memory."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dta_compile
from dta_compile.options import Options
from dta_compile.runtime.cuda_graphs import arenas
from tests.support.blocks import IMAGE, BlockLM, make
from tests.support.cases import (
    LOSSES,
    QUICK,
    cases,
    chain,
    check_transparent,
    fan,
    make_case,
    options,
    with_options,
)
from tests.support.inside import inside
from tests.support.replay import Recorder
from tests.support.tiny import TinyLM, after, assert_same, gradients


@pytest.fixture(scope="module", autouse=True)
def replays():
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arenas.ReplayCache, "pays", lambda cache, device, chunks: True)
        patch.setattr(arenas, "CudaRecorder", Recorder)
        patch.setattr(arenas, "SIZES", (4, 8))
        yield


@pytest.fixture(scope="module")
def model():
    return TinyLM()


@pytest.fixture(scope="module")
def compiled_once(model):
    compiled = compile_with(model)
    compiled(*make_case(chain(4), "right").arguments)  # options are set on what has been compiled
    return compiled


@pytest.fixture
def compiled(compiled_once):
    """The same compilation for all tests, with nothing recorded yet."""
    inside(compiled_once).forget_replays()
    inside(compiled_once).use(Options(attention="reference"))
    return compiled_once


def compile_with(model, **chosen):
    return torch.compile(model, backend="dta", options={"attention": "reference", **chosen})


def counts(compiled):
    return dta_compile.last_plan(compiled).estimates.replays


replayed = st.builds(lambda chosen: Options(**{**vars(chosen), "attention": "reference"}), options)


@pytest.mark.slow
@settings(max_examples=20, **QUICK)
@given(case=cases, chosen=replayed, loss=st.sampled_from(sorted(LOSSES)))
def test_any_batch(model, compiled, case, chosen, loss):
    for _ in range(3):
        check_transparent(model, compiled, case, chosen, loss)


@pytest.mark.parametrize("strategy", ["packed", *(pytest.param(s, marks=pytest.mark.slow) for s in ("vanilla", "dfs"))])
@pytest.mark.parametrize("budget", [0, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sequences", [chain(30), pytest.param(fan(30), marks=pytest.mark.slow), [[], [3], [], [3, 1]]])
@pytest.mark.sample(1)
def test_later_steps_are_replayed_and_equal(model, compiled, sequences, strategy, budget):
    chosen = Options(chunk_size=5, strategy=strategy, sweep="chunks", memory_budget=budget, attention="reference")
    for _ in range(3):
        check_transparent(model, compiled, make_case(sequences, "right"), chosen, "weights")
        last = counts(compiled)
    assert last.replayed > 0
    assert last.eager == last.recorded == 0
    assert "runs replayed, 0 not" in str(dta_compile.last_plan(compiled))


@pytest.mark.slow
def test_blocks_of_tokens_that_attend_to_each_other():
    model = BlockLM()
    compiled = compile_with(model)
    image = [IMAGE + 1] * 3
    for sequences in ([[1, *image, 2], [1, *image, 3, *image]], [[*image, 1, 2], [1, 2, 3, *image, *image]]):
        for _ in range(3):
            chosen = Options(chunk_size=4, attention="reference")
            check_transparent(model, compiled, make(sequences, "right"), chosen, "weights")
        assert counts(compiled).replayed > counts(compiled).eager == 0


def test_what_the_stack_holds_beyond_the_prefix_is_not_read(model, compiled):
    case = make_case(chain(12), "right")
    chosen = Options(chunk_size=3, attention="reference")
    for _ in range(3):
        check_transparent(model, compiled, case, chosen, "weights")
        for stack in inside(compiled).recorded_stacks():
            for buffer in (one for states in stack.states for one in states.buffers):
                buffer.fill_(float("nan"))


def test_gradients_add_up_over_steps(model, compiled):
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3], [1, 2, 1, 1]])

    def steps(run):
        for scale in (1, 2, 3, 4):
            (run(ids).pow(2).sum() * scale).backward()

    assert_same(after(model, lambda: steps(compiled)), after(model, lambda: steps(model)))
    assert counts(compiled).replayed


def test_gradients_are_not_the_memory_that_the_next_step_writes(model, compiled):
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]])
    for _ in range(3):
        model.zero_grad()
        compiled(ids).sum().backward()
    before = {name: grad.clone() for name, grad in gradients(model).items()}
    held = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled(ids).pow(2).sum().backward()
    assert_same({name: held[name] for name in before}, before)


def test_calls_that_overlap_do_not_share_a_stack(model, compiled):
    with_options(compiled, Options(memory_budget=0, attention="reference"))
    first, second = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]]), torch.tensor([[5, 2, 3], [5, 2, 2]])

    def step(run):
        one, two = run(first), run(second)
        one.pow(2).sum().backward()
        two.sum().backward()

    for _ in range(3):
        assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))


def test_a_call_without_backward_leaves_the_graphs_to_the_next(model, compiled):
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]])
    compiled(ids), compiled(ids)
    compiled(ids).sum().backward()
    assert counts(compiled) is not None


def test_two_models_at_once():
    models = [TinyLM(), TinyLM()]
    both = [compile_with(model) for model in models]
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]])
    for _ in range(3):
        outputs = [compiled(ids) for compiled in both]
        for output, compiled, model in zip(outputs, both, models, strict=True):
            actual = after(model, lambda output=output: output.pow(2).sum().backward())
            assert_same(actual, after(model, lambda model=model: model(ids).pow(2).sum().backward()))
            assert counts(compiled)


def test_parameters_that_move_are_read_where_they_are(model, compiled):
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]])

    def step(run):
        run(ids).pow(2).sum().backward()

    for moves in range(3):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * (1 + moves / 10)
        for _ in range(3):
            assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
        assert counts(compiled).replayed


def test_parameters_that_move_all_the_time_end_it_with_one_line(model, compiled, caplog):
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]])
    with caplog.at_level(logging.WARNING, "dta_compile"):
        for _ in range(8):
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            compiled(ids).sum().backward()
    (line,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert "somewhere else in every step" in line
    assert counts(compiled) is None


def test_a_graph_that_cannot_be_recorded_ends_it_with_one_line(model, compiled, caplog, monkeypatch):
    def fail(self, function):
        raise RuntimeError("operation not permitted when stream is capturing\nand a trace")

    monkeypatch.setattr(Recorder, "__call__", fail)
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]])
    with caplog.at_level(logging.WARNING, "dta_compile"):
        for _ in range(3):
            actual = after(model, lambda: compiled(ids).pow(2).sum().backward())
            assert_same(actual, after(model, lambda: model(ids).pow(2).sum().backward()))
    (line,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert line.endswith("operation not permitted when stream is capturing")


def test_it_can_be_switched_off(model):
    compiled, ids = compile_with(model, cuda_graphs=False), torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]])
    for _ in range(3):
        compiled(ids).sum().backward()
    assert counts(compiled) is None


def test_attention_that_needs_the_host_runs_without(model, compiled, caplog):
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]])
    with_options(compiled, Options(attention="cpu"))
    compiled(ids).sum().backward()
    assert counts(compiled) is None
    assert "shape of a chunk from the host" in caplog.text


@pytest.mark.slow
def test_a_stack_that_grows(model, compiled, monkeypatch):
    monkeypatch.setattr(arenas, "CAPACITY", 4)
    chosen = Options(chunk_size=3, attention="reference")
    for length in (4, 4, 4, 30, 30, 30, 4, 4):
        check_transparent(model, compiled, make_case(chain(length), "right"), chosen, "weights")
    assert counts(compiled).replayed


def test_streaming_steps(model, compiled):
    with_options(compiled, Options(chunk_size=3, attention="reference"))
    case = make_case(chain(9), "right")

    def loss_of_row(row, logits):
        return torch.where(case.mask[row, :, None], logits, 0.0).pow(2).sum()

    def eager():
        sum(loss_of_row(row, logits) for row, logits in enumerate(model(*case.arguments))).backward()

    for _ in range(3):
        actual = after(model, lambda: dta_compile.streaming_step(compiled, loss_of_row, *case.arguments) and None)
        assert_same(actual, after(model, eager))
    assert counts(compiled).replayed

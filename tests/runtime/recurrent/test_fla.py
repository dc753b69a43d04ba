"""Recurrences by the kernels of flash-linear-attention, for which there is a stand-in, against torch's operators."""

import functools
import importlib
import inspect
import logging
import pathlib
import random
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dta_compile
from dta_compile.ops.recurrences.blocks import Runs
from dta_compile.ops.recurrences.operators import RECURRENCES
from dta_compile.runtime.calls import mixers
from dta_compile.runtime.path.chunk_shape import ChunkShape
from dta_compile.runtime.path.mixer_runtime import RecurrentInputs
from dta_compile.runtime.recurrent import choose, fla
from dta_compile.runtime.recurrent.layer import RecurrentLayerRuntime
from tests.support.forests import draw_forest, segment
from tests.support.tiny import VOCABULARY, after, assert_same, shared_ids, weighted

PACKAGES = pathlib.Path(__file__).parents[2] / "support" / "packages"
BY_NAME = {recurrence.name: recurrence for recurrence in RECURRENCES.values()}
START = 7  # the depth at which the forests' roots begin

# The arguments of the package's functions in version 0.6.0, as they stand in its source.
SIGNATURES = {
    "gated_delta_rule.chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state"
    " use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu"
    " chunk_indices cp_context kwargs",
    "kda.chunk_kda": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel"
    " use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states"
    " state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs kwargs",
    "simple_gla.chunk_simple_gla": "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens"
    " cu_seqlens_cpu kwargs",
    "gla.chunk_gla": "q k v g scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu",
}


@pytest.fixture(scope="module", autouse=True)
def _package():
    """The package, imported as any other, and gone again afterwards."""
    caches = fla.installed, fla.kernel_for, choose._chosen
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(str(PACKAGES))
        for cache in caches:
            cache.cache_clear()
        yield
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_chosen():
    fla.kernel_for.cache_clear()
    choose._chosen.cache_clear()


def draw_inputs(seed, recurrence, by_channel, dtype=torch.float64, groups=1, longest=12, widths=(3, 5)):
    """Inputs of a drawn forest, depths that are kept, and gradients of what comes out."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    forest = draw_forest(rng, rng.randint(1, 12), longest)
    spine, tokens, (keys, values) = forest[0].last, forest[-1].last, widths
    numbers = sorted(rng.sample(range(1, spine + 1), min(spine, rng.randint(0, 3))))
    sizes = {"query": (groups, keys), "key": (groups, keys), "value": (2, values), "beta": (2,)}
    sizes["decay"] = (2, keys) if by_channel else (2,)
    operands = []
    for operand in recurrence.operands:
        noise = torch.rand(1, tokens, *sizes[operand.name], dtype=torch.float64)
        operands.append((-noise if operand.name == "decay" else noise).to(dtype))
    state = torch.randn(2, keys, values).to(recurrence.state(operands)[1])
    x = RecurrentInputs(tuple(operands), (0.7,), state, ChunkShape.of(START, spine, forest))
    depths = [START + number for number in numbers]
    return x, depths, torch.randn_like(operands[2]), {depth: torch.randn_like(state) for depth in depths}


def results(runtime, x, depths, grad, of_kept):
    out, kept = runtime.forward(x, depths)
    assert out.is_contiguous() and not out.requires_grad
    storages = {state.untyped_storage().data_ptr() for state in kept}
    assert len(storages) == len(kept) and x.state.untyped_storage().data_ptr() not in storages
    grads, of_state = runtime.backward(grad, x, of_kept)
    return [out, *kept, *grads, of_state]


def by_kernel(recurrence, by_channel):
    kernel = fla.kernel_for(recurrence, by_channel)
    assert not isinstance(kernel, str), kernel
    return fla.FlaRuntime(recurrence, kernel)


NAMES = st.sampled_from(["gated_delta_rule", "linear_attention"])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), name=NAMES, by_channel=st.booleans(), groups=st.sampled_from([1, 2]))
def test_forests(seed, name, by_channel, groups):
    recurrence = BY_NAME[name]
    given = draw_inputs(seed, recurrence, by_channel, groups=groups)
    actual, expected = (
        results(runtime, *given) for runtime in (by_kernel(recurrence, by_channel), RecurrentLayerRuntime(recurrence))
    )
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_pieces_and_levels():
    """A run of 8, cut after 3 for a branch and after 5 to be kept; what hangs from the branch, and a further root."""
    forest = [segment(0, 8, [])]
    forest.append(segment(8, 4, forest, 0, 3))
    forest.append(segment(12, 2, forest, 1, 4))
    forest.append(segment(14, 1, forest, 0, 3))
    forest.append(segment(15, 2, forest))
    pieces = fla.Pieces.of(Runs(tuple(forest), (5,)))
    levels, order = pieces.on(torch.device("cpu"))
    assert [level.offsets.tolist() for level in levels] == [[0, 3, 5], [0, 2, 6, 7], [0, 3, 5]]
    assert [level.entries if number == 0 else level.entries.tolist() for number, level in enumerate(levels)] == [
        None,
        [0, 0, 0],
        [0, 1],
    ]
    assert order.tolist() == [0, 1, 2, 15, 16, 3, 4, 8, 9, 10, 11, 14, 5, 6, 7, 12, 13]
    assert pieces.kept == [(1, 0)] and [level.continues for level in levels] == [True, True, False]


def test_a_chain_stays_where_it_is():
    levels, order = fla.Pieces.of(Runs((segment(0, 9, []),), (2, 9))).on(torch.device("cpu"))
    assert order is None and [level.tokens for level in levels] == [2, 7]
    assert levels[-1].continues  # its final state is kept


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    """Of the stand-in, and of what is called there."""
    module, function = name.split(".")
    found = inspect.signature(getattr(importlib.import_module(f"fla.ops.{module}"), function))
    assert list(found.parameters) == SIGNATURES[name].split()
    assert (f"fla.ops.{module}", function) in fla.KERNELS.values()


def chosen(caplog, name="gated_delta_rule", by_channel=False, **others):
    """What computes drawn inputs in bfloat16, chosen twice, and what is said of it."""
    x, depths, *_ = draw_inputs(3, BY_NAME[name], by_channel, **{"dtype": torch.bfloat16, "widths": (16, 32), **others})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dta_compile"):
        found = [choose.ChosenRuntime(BY_NAME[name]).choose(x, depths) for _ in range(2)]
    assert type(found[0]) is type(found[1])
    return found[0], [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", ["gated_delta_rule", "linear_attention"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_what_suits_runs_by_the_kernel(caplog, name, by_channel):
    runtime, said = chosen(caplog, name, by_channel)
    assert isinstance(runtime, fla.FlaRuntime) and not said
    given = draw_inputs(4, BY_NAME[name], by_channel, dtype=torch.bfloat16, widths=(16, 32))
    actual, expected = (results(one, *given) for one in (runtime, RecurrentLayerRuntime(BY_NAME[name])))
    for one, other in zip(actual, expected, strict=True):
        assert (one.float() - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize(
    "others, reason",
    [
        ({"dtype": torch.float32}, "in bfloat16 or float16"),
        ({"widths": (16, 24)}, "divide by 16"),
        ({"widths": (272, 16)}, "at most 256"),
    ],
    ids=str,
)
def test_what_does_not_suit_runs_by_torch(caplog, others, reason):
    runtime, (said,) = chosen(caplog, **others)
    assert isinstance(runtime, RecurrentLayerRuntime) and reason in said and said.startswith("gated_delta_rule")


KERNEL = "chunk_gated_delta_rule"


def older(kernel):
    return lambda q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens: None


def failing(kernel):
    @functools.wraps(kernel)
    def fails(**keywords):
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")

    return fails


def wrong(kernel):
    @functools.wraps(kernel)
    def compiled_wrongly(**keywords):
        out, final = kernel(**keywords)
        return out, final if final is None else final.mT.reshape_as(final)

    return compiled_wrongly


@pytest.mark.parametrize(
    "other, reason", [(older, "does not have cu_seqlens_cpu"), (failing, "fail with RuntimeError"), (wrong, "errors")]
)
def test_kernels_that_do_not_work(caplog, monkeypatch, other, reason):
    module = importlib.import_module("fla.ops.gated_delta_rule")
    monkeypatch.setattr(module, KERNEL, other(getattr(module, KERNEL)))
    runtime, (said,) = chosen(caplog)
    assert isinstance(runtime, RecurrentLayerRuntime) and reason in said


def test_a_package_that_cannot_be_imported(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    runtime, (said,) = chosen(caplog)
    assert isinstance(runtime, RecurrentLayerRuntime) and "cannot be imported" in said


def test_many_pieces_run_by_torch(caplog, monkeypatch):
    """Their states would be held all at once."""
    monkeypatch.setattr(choose, "MOST_STATES", 2 * 16 * 32)
    runtime, said = chosen(caplog)
    assert isinstance(runtime, RecurrentLayerRuntime) and not said


def test_devices(monkeypatch):
    """Kernels are for GPUs, and for some recurrences."""
    layers = {recurrence.name: types.SimpleNamespace(mixer=mixer) for mixer, recurrence in RECURRENCES.items()}
    on_gpu = {name: type(choose.runtime_of(layer, torch.device("cuda"))) for name, layer in layers.items()}
    assert {name for name, kind in on_gpu.items() if kind is choose.ChosenRuntime} == {
        "gated_delta_rule",
        "linear_attention",
    }
    cpu = torch.device("cpu")
    assert all(type(choose.runtime_of(layer, cpu)) is RecurrentLayerRuntime for layer in layers.values())
    monkeypatch.setattr(fla, "installed", lambda: False)
    delta_rule = choose.runtime_of(layers["gated_delta_rule"], torch.device("cuda"))
    assert type(delta_rule) is RecurrentLayerRuntime


class Model(nn.Module):
    """One layer with a gated delta rule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.inputs, self.gates = nn.Linear(8, 24), nn.Linear(8, 4)
        self.double()

    def forward(self, ids):
        x = self.embedding(ids)
        query, key, value = self.inputs(x).unflatten(-1, (6, 4)).split(2, 2)
        decay, beta = self.gates(x).sigmoid().chunk(2, -1)
        mixed = torch.ops.dta.gated_delta_rule(query, key, value, -decay, beta, None, 0.5)
        return self.head(x + mixed.flatten(2))


def test_a_model(monkeypatch):
    """Chunk by chunk, with states on the path that others begin with."""
    calls = []

    def runtime_of(layer, device):
        calls.append(layer)
        return by_kernel(RECURRENCES[layer.mixer], by_channel=False)

    monkeypatch.setattr(mixers, "runtime_of", runtime_of)
    model, ids = Model(), shared_ids()
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4, "verify": "first"})

    def step(run):
        out = run(ids)
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert calls and dta_compile.last_plan(compiled).stats.compression > 1

"""Calibration: known rates come back from noisy times, and the file that keeps them is never in the way."""

import dataclasses
import itertools
import json
import logging
import os
import types

import numpy as np
import pytest
import torch

import dta_compile
from dta_compile.errors import OptionError
from dta_compile.executable.executable import TensorSpec
from dta_compile.options import Options
from dta_compile.plan import Anchor, Backward, CostModel, Forward, Rates, Work
from dta_compile.plan.interpret import chunk_work
from dta_compile.runtime.measure import calibration
from dta_compile.runtime.measure.calibration import (
    BOUND,
    CALLS,
    MINIMUM_RUNS,
    SAMPLES,
    Calibration,
    file_name,
    of_whole_chunks,
    times_as_fast,
)
from tests.support.attention import attention_layer
from tests.support.tiny import SMALL_CHUNKS, TinyLM, shared_ids, weighted

TRUE = {"forward": Rates(3e-3, 2e-4, 1.7e-4, 2e-8, 4e-5), "backward": Rates(4e-3, 3e-4, 3.1e-4, 7e-8, 1e-4)}


def run_of(tokens: int, slices: int = 1, depth: int = 0, heads: int | None = None) -> Work:
    pairs = tokens * depth + tokens * (tokens // slices + 1) // 2
    return Work(1, slices, tokens, pairs, tokens if heads is None else heads)


def varied(random: np.random.Generator) -> Work:
    """A run of up to 2,048 tokens at a depth of up to 4,000."""
    tokens = int(2 ** random.uniform(3, 11))
    slices = min(tokens, int(2 ** random.uniform(0, 4)))
    return run_of(tokens, slices, int(random.uniform(0, 4000)), int(tokens * random.uniform(0, 1)))


def record(learner, make, calls=13, runs=40, noise=0.0, outliers=0.0, true=TRUE, seed=0):
    """Calls of `runs` runs of each kind, `make(random)`, that take what `true` says, give or take."""
    random = np.random.default_rng(seed)

    def seconds(kind, work):
        disturbed = random.uniform(2, 10) if random.random() < outliers else 1.0
        return true[kind].seconds(work) * np.exp(noise * random.standard_normal()) * disturbed

    for _ in range(calls):
        works = [make(random) for _ in range(runs)]
        learner.record([(kind, work, seconds(kind, work)) for kind in true for work in works])
    return learner


def worst_error(model: CostModel, make, true=TRUE) -> float:
    random = np.random.default_rng(99)
    works = [make(random) for _ in range(100)]
    return max(
        abs(getattr(model, kind).seconds(work) / rates.seconds(work) - 1)
        for kind, rates in true.items()
        for work in works
    )


# The fit


@pytest.mark.parametrize(
    ("noise", "outliers", "rates_within", "times_within"),
    [(0, 0, 0.02, 0.005), (0.05, 0, 0.1, 0.03), (0.05, 0.1, 0.15, 0.05)],
)
def test_known_rates_come_back(noise, outliers, rates_within, times_within):
    model = record(Calibration(), varied, noise=noise, outliers=outliers).cost_model()
    for kind, rates in TRUE.items():
        np.testing.assert_allclose(getattr(model, kind), rates, rtol=rates_within)
    assert worst_error(model, varied) < times_within


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_equal_runs_are_predicted_though_their_rates_are_not_determined(noise):
    def always(random):
        return run_of(1024, depth=512)

    model = record(Calibration(), always, noise=noise, outliers=0.1).cost_model()
    assert worst_error(model, always) < 0.05
    # Where the times say nothing, the rates keep the ratios of the defaults, more or less.
    ratios = np.array(model.forward) / np.array(CostModel().forward)
    assert ratios.max() < 3 * ratios.min()


def test_two_sizes_without_prefix_predict_the_sizes_between():
    sizes = itertools.cycle((128, 2048))
    model = record(Calibration(), lambda random: run_of(next(sizes)), noise=0.03).cost_model()
    assert worst_error(model, lambda random: run_of(int(random.integers(128, 2049)))) < 0.08


def test_a_rare_size_counts_as_much_as_a_frequent_one():
    sizes = itertools.cycle([1024] * 39 + [16])
    model = record(Calibration(), lambda random: run_of(next(sizes)), noise=0.03).cost_model()
    assert worst_error(model, lambda random: run_of(16)) < 0.06


def test_rates_are_bounded_whatever_the_times_say():
    def flat(random):
        return run_of(int(2 ** random.uniform(0, 11)))

    learner = Calibration()
    random = np.random.default_rng(0)
    for _ in range(5):
        learner.record([("forward", flat(random), 1.0) for _ in range(50)])  # as if only launches cost
    rates = np.array(learner.cost_model().forward) / np.array(CostModel().forward)
    assert (rates > 0).all()
    assert rates.max() / rates.min() <= BOUND**2 * 1.001


def test_bounded_least_squares_meets_the_conditions_of_optimality():
    random = np.random.default_rng(3)
    for _ in range(50):
        rows = random.standard_normal((8, 5)) * 10.0 ** random.uniform(-3, 3)
        target = random.standard_normal(8) * 10.0 ** random.uniform(-2, 5)
        pull = calibration.PRIOR_WEIGHT
        matrix, right = rows.T @ rows + pull * np.eye(5), rows.T @ target
        found = calibration._bounded(matrix, right)
        slope = (matrix @ found - right - pull) / np.abs(matrix).max()
        low, high = found <= 1 / BOUND * (1 + 1e-9), found >= BOUND * (1 - 1e-9)
        assert (found >= 1 / BOUND * (1 - 1e-9)).all() and (found <= BOUND * (1 + 1e-9)).all()
        assert (np.abs(slope[~low & ~high]) < 1e-6).all()
        assert (slope[low] > -1e-6).all() and (slope[high] < 1e-6).all()


# What is recorded


def test_nothing_recorded_leaves_the_defaults():
    assert Calibration().cost_model() == CostModel()


def test_the_first_call_of_each_kind_is_not_recorded():
    slow = {kind: Rates(*(50 * rate for rate in rates)) for kind, rates in TRUE.items()}
    learner = record(Calibration(), varied, calls=1, true={"forward": slow["forward"]})
    record(learner, varied, calls=1, true={"backward": slow["backward"]})
    assert learner.calls == 0
    assert learner.cost_model() == CostModel()
    record(learner, varied, calls=CALLS)
    assert worst_error(learner.cost_model(), varied) < 0.05


def test_few_runs_scale_the_defaults():
    learner = record(Calibration(), varied, calls=2, runs=(MINIMUM_RUNS - 1) // 2, true={"forward": TRUE["forward"]})
    model = learner.cost_model()
    ratios = np.array(model.forward) / np.array(CostModel().forward)
    np.testing.assert_allclose(ratios, ratios[0])
    assert model.source == "defaults scaled to 7 runs"


def test_a_kind_without_runs_is_scaled_like_the_other():
    model = record(Calibration(), lambda random: run_of(512), true={"forward": TRUE["forward"]}).cost_model()
    forward, backward = CostModel().forward, CostModel().backward
    work = run_of(512)
    expected = TRUE["forward"].seconds(work) / forward.seconds(work)
    np.testing.assert_allclose(np.array(model.backward) / np.array(backward), expected, rtol=1e-3)
    np.testing.assert_allclose(model.restore / CostModel().restore, expected, rtol=1e-3)


def test_rates_follow_the_machine():
    learner = record(Calibration(), varied)
    slower = {kind: Rates(*(2 * rate for rate in rates)) for kind, rates in TRUE.items()}
    record(learner, lambda random: run_of(700, depth=100), calls=2 * CALLS, true=slower)
    assert worst_error(learner.cost_model(), lambda random: run_of(700, depth=100), slower) < 0.25
    record(learner, varied, calls=8 * CALLS, true=slower, seed=1)
    assert worst_error(learner.cost_model(), varied, slower) < 0.05


def test_runs_of_parts_are_learned_as_those_of_chunks():
    """A layer at a time, a chunk takes what all layers together do; what some run again is no run of a chunk."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]] * 2)
    ids[1, 4:] = 9
    compiled = torch.compile(TinyLM(), backend="dta", options={**SMALL_CHUNKS, "sweep": "stages", "memory_budget": 0})
    weighted(compiled(ids)).backward()
    plan = dta_compile.last_plan(compiled)
    ops = [op for op in plan.schedule.ops if isinstance(op, (Anchor, Forward, Backward))]
    whole = of_whole_chunks(plan.estimates.runs)
    assert len(plan.estimates.runs) > 2 * len(ops)
    chunks = plan.schedule.chunks
    assert [(run.kind, run.op.chunk) for run in whole] == [
        *(("forward", chunk) for chunk in chunks),
        *(("backward", chunk) for chunk in reversed(chunks)),
    ]
    of_first = sum(run.seconds for run in plan.estimates.runs if run.op == ops[0])
    assert whole[0].seconds == pytest.approx(of_first) and whole[0].work == chunk_work(plan.prefix_tree, ops[0].chunk)


def test_samples_are_limited():
    learner = Calibration()
    random = np.random.default_rng(0)
    for _ in range(60):
        learner.record([("forward", varied(random), 1.0) for _ in range(40)])
    samples = list(learner.histories["forward"].samples)
    assert SAMPLES - CALLS <= len(samples) <= SAMPLES
    assert max(map(len, learner.histories["forward"].sizes.values())) <= CALLS
    assert learner.histories["forward"].runs == 59 * 40


def test_unknown_kinds_and_times_of_zero_are_left_out():
    learner = record(Calibration(), varied)
    before = learner.cost_model()
    learner.record([("restore", run_of(5), 1.0), ("forward", run_of(5), 0.0), ("forward", Work(), 1.0)])
    assert learner.cost_model() is before


def test_the_model_is_made_once_between_calls_and_later_every_few_calls():
    learner, models = record(Calibration(), varied, calls=1), []
    for call in range(100):
        record(learner, varied, calls=1, runs=2, seed=call)
        models.append(learner.cost_model())
        assert learner.cost_model() is models[-1]
    fitted = [i for i, (before, after) in enumerate(itertools.pairwise(models)) if after is not before]
    assert fitted[:6] == [0, 1, 2, 3, 4, 5] and len(fitted) < 40
    assert max(after - before for before, after in itertools.pairwise(fitted)) <= calibration.LONGEST_WAIT + 1


def test_the_source_says_how_much_and_how_well():
    learner = record(Calibration(), varied, calls=4, noise=0.08)
    source = learner.cost_model().source
    assert source.startswith("calibrated on 240 runs, median error of the fit ")
    assert 2 <= int(source.split()[-1].rstrip("%")) <= 12


def test_how_much_faster_runs_became_is_measured_on_runs_of_the_same_size():
    faster = {kind: Rates(*(rate / 1.25 for rate in rates)) for kind, rates in TRUE.items()}
    before = record(Calibration(), lambda random: run_of(256), noise=0.02, outliers=0.1)
    after = record(Calibration(), lambda random: run_of(256), noise=0.02, outliers=0.1, true=faster, seed=1)
    assert times_as_fast(before, after) == pytest.approx(1.25, rel=0.03)
    other = record(Calibration(), lambda random: run_of(2048), true=faster)
    once = record(Calibration(), lambda random: run_of(256), calls=2, true=faster)  # the first of them warms up
    assert times_as_fast(before, other) is times_as_fast(before, once) is times_as_fast(before, Calibration()) is None


# The file


def executable(digest="1234", training=True, shape=(4, 4), dtype=torch.float32):
    """As much of an executable as names its file."""
    spec = types.SimpleNamespace(index=0, requires_grad=training)
    return types.SimpleNamespace(
        values=[TensorSpec(shape, dtype, torch.device("meta"))],
        region_parameters=[spec],
        mixers=[attention_layer(1, 4, 4, dtype)],
        attention=[attention_layer(1, 4, 4, dtype)],
        training=training,
        chunk_digest=digest,
    )


CPU = torch.device("cpu")


def load(folder, **keywords) -> Calibration:
    return Calibration.load(executable(**keywords), CPU, Options(cache_dir=str(folder)))


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="dta_compile")
    return caplog


def test_json_round_trip():
    learner = record(Calibration(identity="cpu"), varied, noise=0.1)
    again = Calibration.from_json(learner.to_json())
    assert again.to_json() == learner.to_json()
    np.testing.assert_allclose(again.cost_model().forward, learner.cost_model().forward, rtol=1e-3)
    assert again.cost_model().source == learner.cost_model().source


def test_it_is_kept_from_one_engine_to_the_next(tmp_path):
    learner = record(load(tmp_path / "new" / "folder"), varied, calls=5)
    assert learner.calls == 4
    again = load(tmp_path / "new" / "folder")
    assert again.cost_model() == dataclasses.replace(learner.cost_model(), **_rates(again))
    np.testing.assert_allclose(again.cost_model().backward, learner.cost_model().backward, rtol=1e-3)
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".json"]


def _rates(learner: Calibration):
    model = learner.cost_model()
    return {"forward": model.forward, "backward": model.backward, "restore": model.restore}


def test_it_is_written_after_2_4_8_calls(tmp_path):
    learner, written = load(tmp_path), []
    for call in range(18):  # the first one warms up
        record(learner, varied, calls=1, runs=1, seed=call)
        if learner.path.exists():
            written.append(json.loads(learner.path.read_text())["calls"])
    assert sorted(set(written)) == [2, 4, 8, 16]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        '{"format": "something else", "version": 1}',
        '{"format": "dta_compile calibration", "version": 0}',
        '{"format": "dta_compile calibration", "version": 1}',
        "\x00\x01",
        b"\xff\xfe",
        "[" * 100_000,
        '{"format": "dta_compile calibration", "version": 1, "identity": "", "calls": 1' + "0" * 400 + "}",
    ],
)
def test_a_file_that_is_none_of_ours_is_ignored_and_replaced(tmp_path, log, text):
    path = load(tmp_path).path
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    learner = load(tmp_path)
    assert learner.cost_model() == CostModel()
    assert len(log.messages) == 1 and "is not used" in log.messages[0]
    record(learner, varied, calls=3)
    assert load(tmp_path).cost_model().source.startswith("calibrated on")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_waited_for_and_replaced(tmp_path, log, make):
    path = load(tmp_path).path
    make(path)
    learner = load(tmp_path)
    assert len(log.messages) == 1 and "is not used" in log.messages[0]
    record(learner, varied, calls=3)
    assert path.is_file() and load(tmp_path).cost_model().source.startswith("calibrated on")


@pytest.mark.parametrize(
    "row",
    [
        [1, 1, 1, 1, 5, 15, 5],
        [1, 1, 1, 1, 10**400, 15, 5, 1.0],
        [1, 1, 1, 1, 5.5, 15, 5, 1.0],
        [10**9, 1, 1, 1, 5, 15, 5, 1.0],
        [1, 1, 1, 1, 5, 15, 5, 1e300],
        [1, 1, 1, 1, 5, 15, 5, 10**400],
        [1, 1, 1, 1, 5, 15, 5, -1.0],
        [1, 1, 0, 1, 5, 15, 5, 1.0],
        [1, 0, 1, 1, 5, 15, 5, 1.0],
        [1, 1, 1, 1, 5, 15, 5, "x"],
        7,
    ],
)
def test_a_file_with_a_bad_sample_is_ignored(row):
    fields = json.loads(record(Calibration(), varied).to_json())
    fields["samples"]["forward"].append(row)
    with pytest.raises(ValueError):
        Calibration.from_json(json.dumps(fields))


def test_off_reads_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learner = Calibration.load(executable(), CPU, Options(cache_dir="off"))
    record(learner, varied)
    assert learner.cost_model().source.startswith("calibrated on")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, log):
    (tmp_path / "file").write_text("")
    learner = load(tmp_path / "file" / "folder")  # no user, not even root, can make a folder there
    record(learner, varied, calls=20)
    assert learner.cost_model().source.startswith("calibrated on")
    assert len([message for message in log.messages if "is not kept" in message]) == 1


def test_two_at_once_leave_a_whole_file(tmp_path):
    first, second = load(tmp_path), load(tmp_path)
    for call in range(9):
        record(first, varied, calls=1, seed=call)
        record(second, varied, calls=1, seed=100 + call)
    again = load(tmp_path)
    assert again.calls == 8
    assert again.to_json() == second.to_json()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_is_the_option_the_variable_or_the_cache_of_the_user(monkeypatch, tmp_path):
    for name in ("DTA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Options().cache_folder == tmp_path / ".cache" / "dta_compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Options().cache_folder == tmp_path / "xdg" / "dta_compile"
    monkeypatch.setenv("DTA_CACHE_DIR", str(tmp_path / "dta"))
    assert Options().cache_folder == tmp_path / "dta"
    assert Options(cache_dir=str(tmp_path / "named")).cache_folder == tmp_path / "named"
    assert Options(cache_dir="~/here").cache_folder == tmp_path / "here"
    assert Options(cache_dir="off").cache_folder is None
    monkeypatch.setenv("DTA_CACHE_DIR", "off")
    assert Options().cache_folder is None


def test_everything_that_times_depend_on_has_its_own_file(monkeypatch):
    others = [
        {"digest": "5678"},
        {"training": False},
        {"shape": (4, 8)},
        {"dtype": torch.bfloat16},
    ]
    names = {file_name(executable(**keywords), CPU) for keywords in [{}, *others]}
    names.add(file_name(executable(), CPU, attention="other"))
    names.add(file_name(executable(), CPU, generated=True))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 61)
    names.add(file_name(executable(), CPU))
    assert len(names) == len(others) + 4
    assert file_name(executable(), CPU) == file_name(executable(), CPU)
    assert any("61-threads-float32" in name for name in names)
    assert all(name == os.path.basename(name).lower() and " " not in name for name in names)


# The option


def test_the_option_takes_strings_and_paths(tmp_path):
    assert Options.parse({"cache_dir": tmp_path}) == Options(cache_dir=str(tmp_path))
    assert Options().cache_dir is None


@pytest.mark.parametrize("value", [3, False, "", b"bytes", ["list"]])
def test_a_bad_folder_is_named_with_its_key(value):
    with pytest.raises(OptionError, match=r"(?s)'cache_dir'.*a path"):
        Options.parse({"cache_dir": value})


# In the engine


def test_a_compiled_model_is_calibrated_and_says_so(analysed_anew, tmp_path):
    model = TinyLM()
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "cache_dir": tmp_path})
    ids, plans = shared_ids(), []
    for _ in range(4):
        weighted(compiled(ids)).backward()
        plans.append(dta_compile.last_plan(compiled))
    assert "(not calibrated)" in str(plans[1])
    assert "(calibrated on" in str(plans[3]) or "(defaults scaled to" in str(plans[3])
    assert 0.1 < plans[3].estimates.seconds / plans[3].estimates.measured_seconds < 10
    (path,) = tmp_path.iterdir()
    assert Calibration.from_json(path.read_text()).calls == 2

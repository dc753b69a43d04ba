"""The benchmark for GPUs: it runs, fails in parts only, goes on where it stopped, and says what is reached."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.batches.trees import build
from benchmarks.batches.workloads import tiny
from benchmarks.gpu import checks as gpu_checks
from benchmarks.gpu import command as gpu
from benchmarks.gpu import methods as gpu_methods
from benchmarks.gpu import run as gpu_run
from benchmarks.gpu.measure import UNLIMITED
from benchmarks.gpu.methods import METHODS
from benchmarks.gpu.models import Subject, batch_of, expected_seconds, operations
from benchmarks.gpu_report import Check, GpuReport, acceptance
from benchmarks.measuring.results import Outcome, Result
from benchmarks.methods.flex_tree import BLOCK, block_mask, pair_mask, prepare
from benchmarks.methods.packed_tree import pack
from dta_compile.errors import OptionError
from tests.support.tiny import assert_same

TREES = [((1, 130), (3, 100), (2, 70)), ((5, 128),), ((1, 1), (4, 1), (3, 300))]


@pytest.mark.parametrize("levels", TREES)
def test_blocks_of_a_tree_mask_are_those_of_its_pairs(levels):
    sequences = build(levels, 64)
    sequences += [tokens[:50] for tokens in sequences]  # prefixes of others
    tree = pack(sequences, [torch.ones(len(tokens)).numpy() for tokens in sequences])
    prepared = prepare(tree, torch.device("cpu"))
    size = prepared.tokens.shape[1]
    assert size % BLOCK == 0 and torch.equal(prepared.mask[..., : len(tree.ends), : len(tree.ends)], tree.mask() == 0)
    ends = torch.cat([tree.ends, torch.arange(len(tree.ends), size) + 1])
    mine = block_mask(ends)
    theirs = create_block_mask(lambda b, h, q, k: (k <= q) & (q < ends[k]), None, None, size, size, "cpu")
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    for name in ("kv", "q", "full_kv", "full_q"):
        counts, expected = (getattr(mask, f"{name}_num_blocks") for mask in (mine, theirs))
        assert torch.equal(counts, expected)
        for row, count in enumerate(counts.flatten().tolist()):
            indices = [getattr(mask, f"{name}_indices").flatten(0, 2)[row, :count].tolist() for mask in (mine, theirs)]
            assert sorted(indices[0]) == sorted(indices[1])
    assert torch.equal(pair_mask(ends), prepared.mask)


@pytest.mark.slow
def test_everything_runs_without_a_gpu(tmp_path, monkeypatch, capsys):
    def fails(device):
        raise OptionError("unknown option 'cuda_graphs'")

    checks = {"passes": lambda device: Check(True, "fine"), "fails": fails}
    monkeypatch.setattr(gpu_run, "CHECKS", checks)
    arguments = ["--smoke", "--output", str(tmp_path)]
    assert gpu.main(arguments) == 0
    printed = capsys.readouterr().out
    report = GpuReport.load(tmp_path / "results.json")
    (result,) = report.results
    assert result.name == "tiny/airline_tiny" and list(result.outcomes) == list(METHODS)
    for method, outcome in result.outcomes.items():
        assert not outcome.error and outcome.seconds, (method, outcome.error)
        assert outcome.gradient_difference <= 1e-4, method
    assert report.checks["checks/passes"].passed and "unknown option" in report.checks["checks/fails"].error
    assert report.tracebacks.keys() >= {"checks/fails"} and report.running == ""
    for words in ("x checkpoint", "unknown 1.7b/airline_think: peak", "pass    checks/passes: fine", "K tokens/s"):
        assert words in printed
    # A second call tries again what failed, and nothing else.
    monkeypatch.setattr(gpu_run, "CHECKS", {**checks, "fails": checks["passes"]})
    monkeypatch.setattr(gpu_run, "measure", None)
    assert gpu.main([*arguments, "--part", "checks,speed", "--resume", str(tmp_path / "results.json")]) == 0
    report = GpuReport.load(tmp_path / "results.json")
    assert report.checks["checks/fails"].passed and "checks/fails" not in report.tracebacks
    assert not any(outcome.error for outcome in report.results[0].outcomes.values())


@pytest.mark.slow
def test_checks_run_without_a_gpu(monkeypatch):
    for name, few in (("STRATEGIES", ("packed",)), ("CHUNK_SIZES", (7, 64)), ("POISONED", (40,))):
        monkeypatch.setattr(gpu_checks, name, few)
    cpu = torch.device("cpu")
    found = [gpu_checks.float32_equals_float64(cpu), gpu_checks.poisoned_memory_is_not_read(cpu)]
    assert all(check.passed for check in found), found
    assert gpu_checks.no_synchronisation(cpu).passed is None


def test_what_does_not_fit_into_the_time_is_listed(tmp_path, capsys):
    assert gpu.main(["--smoke", "--output", str(tmp_path), "--seconds", "-1"]) == 0
    report = GpuReport.load(tmp_path / "results.json")
    assert not report.results and f"speed/tiny/airline_tiny/{next(iter(METHODS))}" in report.skipped
    assert "skipped speed/tiny/airline_tiny" in capsys.readouterr().out


def test_a_process_that_dies_is_followed_by_another(tmp_path, monkeypatch):
    """The supervisor hands on what is there, and stops when a process leaves nothing behind."""
    started = []

    def process(command, timeout, env):
        started.append(command[2:])
        if len(started) < 3:
            (tmp_path / "results.json").write_text(f"after {len(started)}")
        return dataclasses.make_dataclass("Done", ["returncode"])(gpu_run.BROKEN)

    monkeypatch.setattr(gpu.subprocess, "run", process)
    parser = gpu._parser()
    arguments = parser.parse_args(["--output", str(tmp_path), "--seconds", "500"])
    assert gpu._supervise(arguments, ["--models", "8b"], tmp_path / "results.json") == gpu_run.BROKEN
    assert len(started) == 3 and all(command[:3] == ["benchmarks.gpu", "--models", "8b"] for command in started)
    assert "--keep-failures" not in started[0] and "--keep-failures" in started[1]


def test_what_a_dead_process_ran_has_failed():
    report = GpuReport({}, {}, {}, [result_of("8b/airline_think", {})])
    for running in ("speed/8b/airline_think/auto", "checks/equality"):
        report.running = running
        gpu_run._record_death(report)
    assert "died" in report.results[0].outcomes["auto"].error and "died" in report.checks["checks/equality"].error
    assert report.running == ""


@pytest.fixture(scope="module")
def subject():
    return Subject("tiny", torch.device("cpu"))


def gradients_of(subject, step):
    subject.model.zero_grad()
    step.run()
    found = [parameter.grad.clone() for parameter in subject.model.parameters()]
    subject.model.zero_grad()
    return found


@pytest.mark.slow
def test_a_packed_tree_adapts_to_memory_and_compiler(subject, monkeypatch):
    workload = tiny(subject.config.vocab_size)
    backward, tried = gpu_methods._backward_trees, []

    def picky(model, workload, limit, recompute, static, kernels):
        tried.append((limit, static))
        backward(model, workload, limit, recompute, static, kernels)  # what it leaves behind must not count
        if limit > 8192:
            raise torch.OutOfMemoryError("too much")
        if not static:
            raise RuntimeError("no such size")

    monkeypatch.setattr(gpu_methods, "_backward_trees", picky)
    step = gpu_methods.tree_mask(subject, workload, UNLIMITED)
    found = gradients_of(subject, step)
    assert tried == [(32_768, False), (16_384, False), (8192, False), (8192, True)]
    assert step.note() == "one row; compiled for every length"
    dense = gradients_of(subject, gpu_methods.dense(subject, workload, UNLIMITED))
    assert_same(found, dense, 1e-4)
    assert_same(gradients_of(subject, gpu_methods.varlen(subject, workload, UNLIMITED, recompute=True)), dense, 1e-4)


def test_long_batches_run_a_part_of_the_sequences(subject):
    workload = tiny(subject.config.vocab_size)
    seconds = expected_seconds(operations(subject.config, workload.counts, tree=False))
    whole = gpu_methods.dense(subject, workload, UNLIMITED)
    part = gpu_methods.dense(subject, workload, dataclasses.replace(UNLIMITED, dense_seconds=0.6 * seconds))
    assert (whole.share, whole.note()) == (1.0, "")
    assert 0.45 < part.share < 0.55 and part.note() == "2 of 4 sequences, scaled by operations"


def test_batches_are_whole_groups_if_any_fits(subject):
    def batch(tokens):
        return batch_of("airline_tiny", None, subject.config, dataclasses.replace(UNLIMITED, tokens=tokens))

    groups = [batch(tokens).description.split(", ")[1].split(";")[0] for tokens in (1500, 20_000, 40_000)]
    assert groups == ["a part of 1 of 2 groups", "1 of 2 groups", "2 of 2 groups"]
    assert batch(20_000).counts.tokens <= 20_000


def result_of(name, rates, gibibytes=10):
    outcomes = {
        method: Outcome(seconds=[1 / rate], peak_bytes=gibibytes << 30) if rate else Outcome(error="out of memory")
        for method, rate in rates.items()
    }
    return Result(name, "rollouts", "", None, 8, 1000, 10_000, 100, 2_000, 9.0, outcomes)


@pytest.mark.parametrize(
    ("rates", "verdicts"),
    [
        ({"checkpoint": 1, "dense": 1.3, "tree-mask": 5, "tree-mask-ckpt": 4, "auto": 10.5}, (True, True)),
        ({"checkpoint": 1, "dense": 0, "tree-mask": 0, "tree-mask-ckpt": 6, "auto": 9}, (False, False)),
        ({"checkpoint": 1, "auto": 11}, (True, None)),
        ({"checkpoint": 1, "tree-mask": 0, "tree-mask-ckpt": 0, "auto": 11}, (True, None)),
        ({"checkpoint": 1, "tree-mask": 5, "tree-mask-ckpt": 5, "auto": 0}, (False, False)),
        ({"tree-mask": 5}, (None, None)),
    ],
)
def test_acceptance_of_speed(rates, verdicts):
    lines = acceptance(GpuReport({}, {}, {}, [result_of("4b/airline_think", rates)]))
    assert tuple(line.passed for line in lines[:2]) == verdicts, lines[:2]


def test_acceptance_of_memory_and_low_sharing():
    sharing = result_of("1.7b/airline_think", {"dense": 1, "auto": 9})
    sharing.outcomes["auto"].peak_bytes = 4 << 30
    low = result_of("1.7b/mathlike", {"dense": 0, "checkpoint": 2, "auto": 2.1})
    lines = {line.name: line for line in acceptance(GpuReport({}, {}, {}, [sharing, low]))}
    assert lines["1.7b/airline_think: peak at most 0.5x of dense"].passed
    assert lines["1.7b/mathlike: at least 1x of dense and checkpoint"].passed
    assert lines["1.7b/aimelike: at least 1x of dense and checkpoint"].passed is None


def test_acceptance_against_rivals_at_their_best():
    rivals = {"tree-flash": 6, "cudnn-ckpt": 2, "auto": 9.5, "auto-0": 7}
    result = result_of("8b/airline_think", rivals)
    result.outcomes["auto"].peak_bytes = 20 << 30
    lines = {line.name: line for line in acceptance(GpuReport({}, {}, {}, [result]))}
    of_all = lines["8b/airline_think: at least 1.5x of the fastest rival at its best setting"]
    assert of_all.passed is None and "1.58x of tree-flash; not measured: tree-mask," in of_all.text
    in_memory = lines["8b/airline_think: at least 1.2x of each rival that needs as much memory"]
    assert not in_memory.passed and in_memory.text == "1.17x of tree-flash, within its 10.0 GiB"


def test_arguments_are_checked_before_anything_runs(tmp_path, capsys):
    for arguments in (["--rollouts", str(tmp_path)], ["--workloads", "other"], ["--resume", str(tmp_path / "no.json")]):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
    assert "airline_think.npz" in capsys.readouterr().err

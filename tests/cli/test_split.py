"""Dividing GPUs between rollout and training: the paper's sweep, the curves, and the command `dta split`."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dta_compile.cli import main
from dta_compile.cli.split import System, best, capacity, sweep
from dta_compile.errors import OptionError

# The paper's measured sweep over 8 GPUs, K tokens/s, from 1/7 (rollout/training GPUs) to 7/1.
PAPER = {
    ("1.7B", "dense"): (40.8, 52.1, 43.8, 42.2, 34.9, 26.1, 13.5),
    ("1.7B", "tree"): (41.1, 56.8, 58.3, 62.0, 66.7, 49.4, 40.3),
    ("8B", "dense"): (14.5, 22.6, 20.5, 17.2, 13.8, 9.0, 5.1),
    ("8B", "tree"): (10.9, 27.5, 36.3, 37.0, 51.4, 47.0, 21.5),
}
OPTIMUM = {"dense": "2/6", "tree": "5/3"}
SPLITS = [(roll, 8 - roll) for roll in range(1, 8)]


def single_sides(row):
    """What the cells of a sweep other than its optimum tell about each side alone.

    One more rollout GPU and one less for training made the pipeline faster: then it was rollout that had limited it,
    since training can only have lost. So a cell is a figure of the rollout side if its neighbour towards 7/1 is
    faster, and of the training side if its neighbour towards 1/7 is. Neighbours are asked only if they are not the
    optimum, so its value is never used. Hence of the tree 1/7, 2/6 and 3/5 count for rollout and 7/1 for training (4/4
    and 6/2 would need 5/3); of dense 7/1, 6/2, 5/3 and 4/4 count for training (3/5 would need 2/6). 1/7 and 7/1, the
    ends of the sweep with a single GPU on one side, are always taken as that side's figure per GPU; of dense, 1/7 is
    all there is for rollout.
    """
    best = row.index(max(row))
    rollout, training = row[:best], row[:best:-1]  # by the GPUs of that side, from 1 on
    assert list(rollout) == sorted(rollout) and list(training) == sorted(training)
    roll, train = (dict(enumerate(cells[:-1] or cells, start=1)) for cells in (rollout, training))
    return System(train, roll)


@pytest.mark.parametrize("model", ["1.7B", "8B"])
def test_the_single_sides_of_the_paper_give_its_optimum_splits_and_their_order(model):
    fastest = {name: best(sweep(single_sides(PAPER[model, name]), 8)) for name in OPTIMUM}
    assert {name: cell.split for name, cell in fastest.items()} == OPTIMUM
    assert fastest["tree"].throughput > 1.2 * fastest["dense"].throughput
    assert not any(cell.measured for cell in fastest.values())


def test_cells_of_the_paper_that_were_used():
    used = {key: single_sides(row) for key, row in PAPER.items()}
    assert [list(used[model, "tree"].roll) for model in ("1.7B", "8B")] == [[1, 2, 3]] * 2
    assert [list(used[model, "tree"].train) for model in ("1.7B", "8B")] == [[1]] * 2
    assert [list(used[model, "dense"].roll) for model in ("1.7B", "8B")] == [[1]] * 2
    assert [list(used[model, "dense"].train) for model in ("1.7B", "8B")] == [[1, 2, 3, 4]] * 2
    assert used["1.7B", "tree"].train == {1: 40.3} and used["8B", "dense"].roll == {1: 14.5}


@pytest.mark.parametrize("model, name", PAPER)
def test_measuring_the_best_split_until_it_is_measured_ends_at_the_optimum(model, name):
    row = PAPER[model, name]
    measured = {}
    while not (top := best(sweep(System({1: row[-1]}, {1: row[0]}, measured), 8))).measured:
        split = top.roll_gpus, top.train_gpus
        measured[split] = row[SPLITS.index(split)]
    assert top.split == OPTIMUM[name]
    assert len(measured) <= 5


@pytest.mark.parametrize("model, name", PAPER)
def test_a_whole_sweep_is_given_back_with_the_side_that_limits_each_split(model, name):
    row = PAPER[model, name]
    made = sweep(System(measured=dict(zip(SPLITS, row, strict=True))), 8)
    assert [cell.throughput for cell in made] == list(row)
    assert [min(cell.roll, cell.train) for cell in made] == pytest.approx(list(row))
    top = row.index(max(row))
    assert {cell.limit for cell in made[:top]} == {"rollout"}
    assert {cell.limit for cell in made[top + 1 :]} == {"training"}


def test_figures_per_gpu_give_the_ideal_model():
    made = sweep(System({1: 3.0}, {1: 2.0}), 10)
    assert [cell.throughput for cell in made] == [min(3.0 * (10 - n), 2.0 * n) for n in range(1, 10)]
    assert best(made).split == "6/4"
    assert [cell.limit for cell in made[4:7]] == ["rollout", "training", "training"]  # equal sides: training


def test_figures_of_a_whole_cluster_are_figures_per_gpu():
    assert sweep(System({8: 80.0}, {8: 40.0}), 8) == sweep(System({1: 10.0}, {1: 5.0}), 8)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.integers(1, 30), st.floats(0.1, 1e6), min_size=1))
def test_curves_go_through_their_points_and_rise_if_these_do(figures):
    points = dict(zip(sorted(figures), sorted(figures.values()), strict=True))
    curve = [capacity(points, gpus) for gpus in range(1, 40)]
    assert all(curve[gpus - 1] == pytest.approx(throughput) for gpus, throughput in points.items())
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(curve))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(SPLITS), st.floats(1, 100)), st.floats(1, 100), st.floats(1, 100))
def test_measured_splits_are_exact_and_within_what_both_sides_can_do(measured, train, roll):
    made = sweep(System({1: train}, {1: roll}, measured), 8)
    for cell, split in zip(made, SPLITS, strict=True):
        assert cell.measured == (split in measured)
        assert cell.throughput <= min(cell.roll, cell.train) * (1 + 1e-12)
        assert cell.throughput == measured.get(split, min(cell.roll, cell.train))


def test_the_fastest_measured_split_tells_about_its_slower_side_alone():
    measured = {(4, 4): 10.0, (2, 6): 6.0}
    by_training = sweep(System({1: 2.6}, {1: 3.1}, measured), 8)[3]
    assert (by_training.train, by_training.roll, by_training.limit) == (10.0, 12.0, "training")
    measured = {(4, 4): 10.0, (6, 2): 6.0}
    by_rollout = sweep(System({1: 3.1}, {1: 2.6}, measured), 8)[3]
    assert (by_rollout.train, by_rollout.roll, by_rollout.limit) == (12.0, 10.0, "rollout")


@pytest.mark.parametrize(
    "system, gpus, message",
    [
        (System({1: 1.0}), 8, "no throughput of rollout"),
        (System({}, {1: 1.0}), 8, "no throughput of training"),
        (System(measured={(4, 4): 1.0}), 8, "no throughput of rollout"),
        (System({1: 1.0}, {1: 1.0}, {(2, 2): 1.0}), 8, "split 2/2"),
    ],
)
def test_figures_that_do_not_suffice_are_named(system, gpus, message):
    with pytest.raises(OptionError, match=message):
        sweep(system, gpus)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_throughputs_are_positive(value):
    for figures in ({"train": {1: value}}, {"roll": {2: value}}, {"measured": {(5, 3): value}}):
        with pytest.raises(OptionError, match="bad throughput"):
            System(**figures)
    with pytest.raises(OptionError, match="bad number of GPUs"):
        System(measured={(8, 0): 1.0})


FIGURES = ["--train", "40.3", "--roll", "41.1", "2=56.8", "3=58.3"]


def test_the_command_names_the_side_that_limits_each_split(capsys):
    assert main(["split", "--gpus", "8", *FIGURES]) == 0
    rows = {words[0]: words[1:] for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert rows["1/7"] == ["41.1", "rollout"]
    assert rows["5/3"] == ["97.17", "*", "rollout"]


def test_the_command_takes_measured_splits_and_writes_json(capsys):
    arguments = ["--train", "40.3", "--roll", "41.1", "--measured", "4/4=62", "5/3=66.7"]
    assert main(["split", "--gpus", "8", *arguments, "--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    cells = {cell["split"]: cell for cell in made["sweep"]}
    assert (cells["5/3"]["throughput"], cells["5/3"]["measured"], cells["4/4"]["limit"]) == (66.7, True, "rollout")
    assert made["best"] == max(made["sweep"], key=lambda cell: cell["throughput"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gpus", "8"], "no throughput of rollout"),
        (FIGURES, "--gpus"),
        (["--gpus", "8", "--train", "fast", "--roll", "1"], "'fast'"),
        (["--gpus", "8", "--train", "x=1", "--roll", "1"], "'x=1'"),
        (["--gpus", "8", "--train", "1", "--roll", "1", "--measured", "5=3"], "'5=3'"),
        (["--gpus", "8", "--train", "1", "1=2", "--roll", "1"], "two figures"),
        (["--gpus", "8", "missing.json"], "missing.json"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    assert main(["split", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_does_not_import_torch():
    code = (
        "import sys; from dta_compile.cli import main;"
        f"assert main(['split', '--gpus', '8', *{FIGURES}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

"""TRL's GRPOTrainer with one added line trains to the same weights, over a prefix tree at every step."""

import importlib.util
import pathlib
import sys

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "trl_grpo.py"
STEPS = 2


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("trl_grpo_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def settings(example):
    return example.Settings(steps=STEPS, prompt=24, completion=6, group=3, hidden=32)


@pytest.fixture(scope="module")
def eager(example, settings):
    return example.train(settings, where=None)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("where", ["model", "backbone"])
def test_grpo_trainer_ends_at_the_weights_of_eager(example, settings, eager, where):
    ours = example.train(settings, where=where)
    initial = dict(example.model(settings).named_parameters())
    assert all((value - initial[name]).abs().max() > 1e-6 for name, value in eager.weights.items())
    assert example.difference(eager, ours) < 2e-6
    assert ours.losses == pytest.approx(eager.losses, abs=1e-6)
    assert len({id(plan) for plan in ours.plans}) == STEPS, "every step's forward makes a plan"
    assert all(plan.stats.compression > 2 for plan in ours.plans)

"""The demo's own parts: its loss, its micro-batches, and that it compares what it says it compares."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

import dta_compile
from dta_compile.cli import demo
from dta_compile.data import bundled, load_rollouts, pad_batch


@pytest.fixture(scope="module")
def batch():
    rollouts = [rollout for rollout in load_rollouts(bundled(), dense=True) if rollout.turn == 0]
    return {name: torch.from_numpy(array) for name, array in vars(pad_batch(rollouts)).items()}


def test_micro_batches_are_the_batch_without_needless_padding(batch):
    parts = list(demo.micro_batches(batch, 3))
    assert [len(part["input_ids"]) for part in parts] == [3, 3, 2]
    for index, part in enumerate(parts):
        width = part["input_ids"].shape[1]
        assert part["attention_mask"].sum(1).max() == width
        assert torch.equal(part["input_ids"], batch["input_ids"][3 * index :][:3, :width])
        assert torch.equal(part["advantages"], batch["advantages"][3 * index :][:3])


def test_loss_clips_only_where_clipping_lowers_the_objective():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    old = torch.zeros(2, 3)
    logprobs = torch.tensor([[1.0, -1.0, 5.0], [1.0, -1.0, 0.0]])  # ratios e, 1/e and 1
    batch = {"loss_mask": mask, "advantages": torch.tensor([1.0, -2.0]), "old_logprobs": old}
    settings = demo.Settings(clip=0.2, entropy_weight=0.5)
    e = torch.e
    objective = (1.2 + 1 / e) - 2 * (e + 0.8 + 1) + 0.5 * 5
    loss = demo.grpo_loss(logprobs, torch.ones(2, 3), batch, 5, settings)
    assert loss.item() == pytest.approx(-objective / 5, rel=1e-6)


def test_side_by_side_run_agrees_and_reports(monkeypatch):
    """With one layer of the demo's four: what is asserted is the same for any number."""
    config = demo.Qwen3Config
    monkeypatch.setattr(demo, "Qwen3Config", lambda **sizes: config(**{**sizes, "num_hidden_layers": 1}))
    settings = demo.Settings(turns=1, steps=1, micro_batch=4, backend="eager")
    console = Console(file=io.StringIO(), width=100)
    assert demo.main(settings, console) == 0
    text = console.file.getvalue()
    for row in ("tokens, tree tokens", "speed-up", "largest gradient difference", "loss at the last step"):
        assert row in text
    assert "step 1 of 1: eager" in text  # also where the output is no terminal


def test_a_disagreement_is_reported_and_fails(monkeypatch, tmp_path):
    plan = dta_compile.plan([[1, 2, 3], [1, 2, 4]])
    good = demo.Result(8, 100, 50, [1.0], [0.5], 2.0, 1e-6, 0.5, 0.5, "gradients within 1e-6", plan)
    settings = demo.Settings(steps=1, html="page.html")
    monkeypatch.chdir(tmp_path)
    for result, code in ((good, 0), (dataclasses.replace(good, gradient_difference=0.1), 1)):
        console = Console(file=io.StringIO(), width=100)
        monkeypatch.setattr(demo, "run", lambda *_, result=result: result)
        assert demo.main(settings, console) == code
        text = console.file.getvalue()
        assert ("disagree" in text) == bool(code)
        assert "2.00x" in text and "dta plan: 2 sequences, 6 tokens, 4 to run" in text
        assert "self-check of the first call: gradients within 1e-6" in text
        assert text.index("What to do next") < text.index("dta plan YOUR_FILE")
        assert "<html" in (tmp_path / "page.html").read_text()

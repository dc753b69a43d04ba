"""examples/async_grpo: advantages of a tree of turns, the account of rollouts, sampling, and runs that are killed.

What plays the game needs TextArena (`pip install -e ".[rl]"`).
"""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.async_grpo.policy import make_model, parts
from examples.async_grpo.record import Counts, Record
from examples.async_grpo.run import prepare
from examples.async_grpo.samples import Sample, Turn, advantages, finish
from examples.async_grpo.settings import Settings
from examples.async_grpo.update import Learner
from examples.async_grpo.weights import Follower, publish

TINY = Settings(hidden=32, layers=1, heads=2, warm_steps=2, tasks_at_once=2, batch_tokens=900, way="eager")


def turn(parent, *rewards):
    """A turn after another one, and the rewards of the episodes that end with it."""
    made = Turn(parent, [], 0, [])
    for reward in rewards:
        finish(made, reward)
    return made


def sample(length=12, start=8, advantage=1.0, version=0, seed=0, logprob=-1.0):
    tokens = np.random.default_rng(seed).integers(4, 60, length).astype(np.int32)
    return Sample(tokens, start, np.full(3, logprob, np.float32), advantage, 0.5, 0, version)


def test_without_forks_the_advantage_is_grpos():
    rewards = [0.0, 0.5, 1.0]
    firsts = [turn(None) for _ in rewards]
    lasts = [turn(first, reward) for first, reward in zip(firsts, rewards, strict=True)]
    found = advantages([*firsts, *lasts])
    scale = np.std(rewards) + 1e-4
    for first, last, reward in zip(firsts, lasts, rewards, strict=True):
        assert found[first] == found[last] == pytest.approx((reward - 0.5) / scale)


def test_turns_are_compared_with_others_in_the_same_state():
    first, other = turn(None), turn(None, 1.0)
    good, bad = turn(first, 1.0), turn(first, 0.0)
    after = turn(bad, 0.0)
    bad.rewards.clear(), first.rewards.clear()
    first.rewards, bad.rewards = [1.0, 0.0], [0.0]
    found = advantages([first, other, good, bad, after])
    scale = np.std([1.0, 0.0, 1.0]) + 1e-4
    assert found[good] == -found[bad] == pytest.approx(0.5 / scale)
    assert found[first] == -found[other] == pytest.approx(-0.25 / scale)
    assert found[after] == found[bad]


@pytest.mark.parametrize("rewards", [[], [0.7], [0.3, 0.3, 0.3]])
def test_what_cannot_be_compared_has_no_advantage(rewards):
    assert all(value == 0 for value in advantages([turn(None, reward) for reward in rewards]).values())


def test_every_rollout_leaves_once(tmp_path):
    record = Record(tmp_path)
    first, second = record.claim_tasks(0, 2)
    record.add(first, [sample(), sample()])
    record.add(second, [sample(length=20), sample()])
    numbers = [number for number, _ in record.waiting_after(0)]
    assert record.counts() == Counts(made=4, waiting=4, trained=0, expired=0)
    record.finish_update(1, numbers[:2], numbers[2:3], {"loss": 0.5})
    assert record.counts() == Counts(made=4, waiting=1, trained=2, expired=1)
    assert record.updates() == [{"version": 1, "loss": 0.5}]
    with pytest.raises(RuntimeError, match="version 2: 1 of 2 rollouts had left before"):
        record.finish_update(2, [numbers[1], numbers[3]], [], {})
    assert record.counts() == Counts(made=4, waiting=1, trained=2, expired=1)
    ((number, last),) = record.waiting_after(0)
    assert number == numbers[3] and np.array_equal(last.tokens, sample().tokens)


def test_undone_updates_give_their_rollouts_back(tmp_path):
    record = Record(tmp_path)
    record.add(*record.claim_tasks(0, 1), [sample() for _ in range(3)])
    for version in (1, 2, 3):
        record.finish_update(version, [version], [], {})
    assert Record(tmp_path).go_back(1) == 2
    assert [number for number, _ in record.waiting_after(0)] == [2, 3]
    assert record.rows("resumed") == [(1, 2, 2)]
    record.finish_update(2, [2, 3], [], {})
    assert record.trained_in() == [(1, 1), (2, 2), (3, 2)]


def test_a_task_is_recorded_as_a_whole(tmp_path):
    record = Record(tmp_path)
    (task,) = record.claim_tasks(0, 1)
    broken = dataclasses.replace(sample(), advantage=None)
    with pytest.raises(Exception, match="NOT NULL"):
        record.add(task, [sample(), broken])
    assert record.counts().made == 0
    assert record.claim_tasks(1, 2) == [task + 1, task + 2]


def test_weights_arrive_with_their_version(tmp_path):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    follower = Follower(tmp_path, other)
    assert follower.refresh() is None
    for version in (0, 7):
        with torch.no_grad():
            model.weight.add_(1)
        publish(tmp_path, version, model, snapshot=False)
        assert follower.refresh() == version
        assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("count", [1, 2, 300])
def test_micro_batches_have_every_sample_once(count):
    samples = [sample(length=12 + number % 150, seed=number) for number in range(count)]
    rows = list(parts(samples, "eager"))
    assert sum(len(part.ids) for part in rows) == count
    assert sum(int(part.loss_mask.sum()) for part in rows) == 3 * count


def test_stale_samples_weigh_what_their_policy_says():
    """The objective by hand, of one sample whose behaviour is far from the model: the weight is cut off."""
    torch.manual_seed(0)
    settings = dataclasses.replace(TINY, kl=0.0)
    model = make_model(settings, 60)
    for logprob, weight in ((-50.0, 2.0), (0.0, None)):
        means = Learner(settings, make_model(settings, 60)).update([sample(logprob=logprob)])
        one = torch.tensor(sample().tokens[None].astype(np.int64))
        with torch.no_grad():
            own = model(one).logits.log_softmax(-1)[0, 7:10].gather(-1, one[0, 8:11, None])[:, 0]
        expected = weight or float(own.exp().clamp(max=2.0).mean())
        assert means["weight"] == pytest.approx(expected, rel=1e-5)
        assert means["loss"] == pytest.approx(-expected, rel=1e-5)


def test_a_folder_keeps_its_settings(tmp_path):
    prepare(tmp_path, TINY)
    (tmp_path / "stop").touch()
    assert prepare(tmp_path, dataclasses.replace(TINY, updates=5)).updates == 5
    assert not (tmp_path / "stop").exists()
    with pytest.raises(ValueError, match=r"other settings: \{'seed': 0\}"):
        prepare(tmp_path, dataclasses.replace(TINY, seed=1))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("way", "fast", "way is 'fast'; expected one of eager, compiled, dta"),
        ("batch_tokens", 0, "batch_tokens is 0; expected more than 0"),
        ("patience", -1, "patience is -1; expected 0 or more"),
        ("hidden", 33, "hidden 33 and heads 2"),
        ("guesses", 1, "at least 2 guesses"),
    ],
)
def test_bad_settings_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **{name: value})


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"speed": 3}', "\u2603"])
def test_a_damaged_folder_is_named(tmp_path, text):
    (tmp_path / "settings.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="holds no settings of this program"):
        Settings.load(tmp_path)


def test_sampled_log_probs_are_those_of_the_whole_game():
    """Through shared prompts, rows of different lengths and forks."""
    pytest.importorskip("textarena")
    from examples.async_grpo.game import draw_task
    from examples.async_grpo.sampling import Player
    from examples.async_grpo.text import train_tokenizer

    tokenizer = train_tokenizer(["You have to guess the number between 3 and 12.", "[5] higher lower"])
    model = make_model(TINY, tokenizer.get_vocab_size()).double().eval()
    player = Player(model, tokenizer, torch.Generator().manual_seed(3), action_tokens=4)
    played = player.play([draw_task(TINY, number) for number in range(2)], roots=2, branches=3)
    assert all(sum(each.parent is None for each in turns) == 2 for turns in played)
    assert any(len([each for each in turns if each.parent is first]) == 3 for turns in played for first in turns)
    for one in (each for turns in played for each in turns):
        if one.parent is not None:
            assert one.tokens[: len(one.parent.tokens)] == one.parent.tokens
        with torch.no_grad():
            logprobs = model(torch.tensor([one.tokens])).logits[0].float().log_softmax(-1)
        said = one.tokens[one.start :]
        expected = [logprobs[one.start - 1 + place, token].item() for place, token in enumerate(said)]
        assert one.logprobs == pytest.approx(expected, abs=1e-6)
        assert one.rewards and all(math.isfinite(reward) for reward in one.rewards)


def episodes(seed, count=40):
    """Samples of games that fork: random tokens, turns as prefixes of one another."""
    generator = np.random.default_rng(seed)
    prompt, games = generator.integers(4, 60, 30), []
    for _ in range(count // 4):
        game = prompt
        for _ in range(4):
            start = len(game)
            game = np.r_[game, generator.integers(4, 60, 8)]
            logprobs = np.log(generator.uniform(0.01, 0.03, 4)).astype(np.float32)
            games.append(Sample(game.astype(np.int32), start, logprobs, float(generator.normal()), 0.0, 0, 0))
    return games


@pytest.mark.slow
def test_replayed_updates_are_equal_to_rounding(monkeypatch):
    """Over 20 updates dta differs from eager at most twice as much as eager does that adds its rows up otherwise."""
    settings = dataclasses.replace(TINY, epochs=2, kl=0.05)

    def train(way, micro_tokens):
        monkeypatch.setattr("examples.async_grpo.policy.MICRO_TOKENS", micro_tokens)
        learner = Learner(dataclasses.replace(settings, way=way), make_model(settings, 60))
        losses = [learner.update(episodes(seed))["loss"] for seed in range(20)]
        return losses, {name: value.detach() for name, value in learner.model.named_parameters()}

    losses, weights = train("eager", 600)
    differences = {}
    for name, way, micro_tokens in (("eager", "eager", 200), ("compiled", "compiled", 600), ("dta", "dta", 600)):
        other_losses, other = train(way, micro_tokens)
        differences[name] = max(float((other[key] - weights[key]).abs().max()) for key in weights)
        assert other_losses == pytest.approx(losses, abs=1e-5)
    initial = dict(make_model(settings, 60).named_parameters())
    moved = max(float((weights[key] - initial[key]).detach().abs().max()) for key in weights)
    assert differences["dta"] <= 2 * differences["eager"] < 0.01 * moved, differences


class Command:
    """`python -m examples.async_grpo` in a process group of its own."""

    def __init__(self, folder, *options):
        self.folder = folder
        given = [f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(TINY).items() if value]
        command = [sys.executable, "-m", "examples.async_grpo", str(folder), "--checkpoint-every=3", *given, *options]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, cwd=root, start_new_session=True, stderr=subprocess.PIPE, text=True)

    def kill(self, role, after):
        """Kill a process when so many updates are recorded."""
        self.wait_for(after)
        os.kill(int((self.folder / "pids" / role).read_text()), signal.SIGKILL)

    def wait_for(self, updates, seconds=240):
        deadline = time.monotonic() + seconds
        while not (self.folder / "record.sqlite").exists() or len(Record(self.folder).updates()) < updates:
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def end(self, seconds=240):
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors


def assert_nothing_lost_or_twice(record, updates):
    """Every rollout is in one place, every update has a batch, and versions follow one another."""
    counts, trained = record.counts(), record.trained_in()
    assert counts.made == counts.waiting + counts.trained + counts.expired
    assert counts.trained == len(trained) == len({number for number, _ in trained})
    assert [update["version"] for update in record.updates()] == list(range(1, updates + 1))
    for update in record.updates():
        assert update["samples"] == sum(version == update["version"] for _, version in trained)
    numbers = {number for number, _ in record.waiting_after(0, 10**9)} | {number for number, _ in trained}
    assert len(numbers) + counts.expired == counts.made


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_killed_processes_lose_nothing(tmp_path, engine):
    """A worker, the trainer between two checkpoints, then all of them; then an interruption, and on to the end."""
    pytest.importorskip("textarena")
    if engine == "ray":
        pytest.importorskip("ray")
    folder = tmp_path / "run"
    command = Command(folder, f"--engine={engine}", "--updates=12")
    command.kill("worker-0", after=1)
    command.kill("trainer", after=4)
    command.wait_for(6)
    os.killpg(command.process.pid, signal.SIGKILL)
    command.end()
    time.sleep(2)  # what Ray started is not in the group, and notices
    before = Record(folder)
    assert {role for role, _ in before.rows("deaths")} == {"worker-0", "trainer"}
    assert sum(returned for _, _, returned in before.rows("resumed")) > 0
    command = Command(folder, f"--engine={engine}", "--updates=12")
    command.wait_for(8)
    command.process.send_signal(signal.SIGINT)
    code, errors = command.end()
    assert code == 130 and "the same command goes on" in errors, errors
    done = len(Record(folder).updates())
    assert 8 <= done < 12
    assert_nothing_lost_or_twice(Record(folder), done)
    code, errors = Command(folder, f"--engine={engine}", "--updates=12").end()
    assert code == 0, errors
    record = Record(folder)
    assert_nothing_lost_or_twice(record, 12)
    assert record.rows("resumed")[-1][1:] == (0, 0)  # an interrupted run has left a checkpoint

"""verl's actor with strategy=dta trains to the weights of its own FSDP2 engine, whatever its batching."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from transformers import AutoModelForTokenClassification
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import DistillationLossConfig, FSDPActorConfig
from verl.workers.utils.losses import value_loss

import dta_compile
from dta_compile.errors import OptionError, RefusalError
from dta_compile.integrations.verl_engine import DTAEngineConfig
from tests.support import vision
from tests.support.verl_cpu import (
    REFERENCE,
    VOCABULARY,
    Settings,
    actor_of,
    data_of,
    engine_of,
    image_rollouts,
    nested_rollouts,
    save_model,
    train,
    verl_on_cpu,
)

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    with verl_on_cpu():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    save_model(path, VOCABULARY)
    return path


@pytest.fixture(scope="module")
def rollouts():
    return nested_rollouts(VOCABULARY)


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def assert_same_training(ours, expected, start, tolerance=3e-6):
    assert largest_difference(ours.scores, expected.scores) < tolerance
    for report, wanted in zip(ours.reports, expected.reports, strict=True):
        assert report["metrics"] == wanted["metrics"]
        assert report["loss"] == pytest.approx(wanted["loss"], abs=tolerance)
        assert report["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-5)
    assert largest_difference(ours.weights, expected.weights) < tolerance
    assert all((expected.weights[name] - start[name]).abs().max() > 100 * tolerance for name in start)


def weights_of(engine):
    return {
        name: one.detach().full_tensor().clone() for name, one in engine.module.named_parameters() if one.requires_grad
    }


def both(checkpoint, rollouts, settings):
    """What verl's engine and ours come to, trained parameters before, and our engine."""
    eager, engine = (engine_of(strategy, checkpoint, settings) for strategy in (REFERENCE, "dta"))
    start = weights_of(eager)
    return train(engine, rollouts, settings), train(eager, rollouts, settings), start, engine


@pytest.mark.parametrize("tokens", [None, 90], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
def test_updates_end_at_the_weights_of_verl(checkpoint, rollouts, remove_padding, tokens):
    settings = Settings(
        remove_padding=remove_padding, tokens=tokens, rows=2, entropy=0.01 * remove_padding, temperature=0.8
    )
    ours, expected, start, engine = both(checkpoint, rollouts, settings)
    assert_same_training(ours, expected, start)
    plan = dta_compile.last_plan(engine.token_values)
    assert plan.stats.sequences == len(rollouts)  # all of them at once
    assert plan.stats.compression > 1.5


@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
def test_images_are_shared(tmp_path, remove_padding):
    """Positions in three axes, a row without images; verl's own engine replaces `forward` of the same classes."""
    model = vision.build("qwen3_vl", torch.float32)
    model.save_pretrained(tmp_path)
    settings = Settings(remove_padding=remove_padding, entropy=0.01)
    ours, expected, start, engine = both(str(tmp_path), image_rollouts(model), settings)
    large = {name: value for name, value in start.items() if "mlp" in name and value.dim() > 1}
    assert {name.split(".")[1] for name in large} == {"visual", "language_model"}
    assert_same_training(ours, expected, large)
    plan = dta_compile.last_plan(engine.token_values)
    assert plan.stats.compression > 1.5
    assert "9 images (or other media), 3 different and encoded" in str(plan)


def test_adapters_are_trained(checkpoint, rollouts):
    settings = Settings(rows=2, learning_rate=3.0, model={"lora_rank": 4})
    ours, expected, start, _ = both(checkpoint, rollouts, settings)
    assert 0 < len(start) < len(expected.weights)
    assert_same_training(ours, expected, {name: value for name, value in start.items() if "lora_B" in name})


def test_what_verl_sets_by_default(checkpoint, rollouts):
    """Checkpointing, bfloat16, AdamW: of float32's values we are not farther away than verl is."""
    settings = Settings(rows=2, optimizer="AdamW", learning_rate=1e-3)
    exact = train(engine_of(REFERENCE, checkpoint, settings), rollouts, settings, steps=2)
    settings = dataclasses.replace(settings, checkpointing=True, engine={"mixed_precision": None})
    ours, expected, _, engine = both(checkpoint, rollouts, settings)
    assert not engine.module.is_gradient_checkpointing
    mean = [(one.scores["log_probs"] - exact.scores["log_probs"]).abs().mean() for one in (ours, expected)]
    assert mean[0] < mean[1] < 0.02
    for number, report in enumerate(exact.reports):
        assert ours.reports[number]["loss"] == pytest.approx(report["loss"], abs=5e-3)
    assert ours.reports[0]["grad_norm"] == pytest.approx(exact.reports[0]["grad_norm"], rel=0.02)


def test_verls_mixed_precision_is_no_nearer_to_float32_than_ours():
    launch = [
        "torch.distributed.run",
        "--standalone",
        "-m",
        "tests.support.verl_defaults",
        "--small",
        "--mixed",
        "--sgd",
    ]
    done = subprocess.run([sys.executable, "-m", *launch], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, verls = json.loads(done.stdout.splitlines()[-1])["from_exact"]
    assert ours < verls < 0.2  # of the update


@pytest.mark.parametrize("more", [[], ["--ulysses"]], ids=["own trees", "one tree"])
def test_verls_own_configuration_on_two_ranks(more):
    """Nothing but the strategy is set; rows meet on the rank whose tree they share most with, and values return."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.support.verl_defaults"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, "--small", *more], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"] > 1e-3
    assert found["difference"] < 3e-6 and found["scores"][0] < 3e-6
    assert found["compression"] > 1.1 * found["compression_of_verls"]


def test_distillation_by_verls_worker_on_two_ranks():
    """Three updates towards the largest log-probs of a teacher, each over new rows, which ranks exchange."""
    pytest.importorskip("uvicorn")  # verl's worker imports both, and verl does not ask for them
    pytest.importorskip("fastapi")
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.support.verl_distillation"]
    done = subprocess.run([sys.executable, "-m", *launch], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"] > 1e-4
    assert found["difference"] < 3e-6
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)
    assert found["compression"] > 2


def critic_loss(**values):
    config = types.SimpleNamespace(cliprange_value=5.0, loss_agg_mode="token-mean", loss_scale_factor=None)
    return value_loss(config, **values)


@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
def test_critics_end_at_the_weights_of_verl(checkpoint, rollouts, remove_padding, monkeypatch):
    load = AutoModelForTokenClassification.from_pretrained
    settings = Settings(remove_padding=remove_padding, rows=2)
    found = []
    for strategy in (REFERENCE, "dta"):
        with monkeypatch.context() as patch:
            if strategy == REFERENCE:  # verl asks for a package for GPUs
                without = functools.partial(load, attn_implementation="sdpa")
                patch.setattr(
                    AutoModelForTokenClassification,
                    "from_pretrained",
                    lambda *args, attn_implementation, without=without, **others: without(*args, **others),
                )
            engine = engine_of(strategy, checkpoint, settings, "value_model")
        start = weights_of(engine)
        with engine.eval_mode():
            values = engine.infer_batch(data_of(rollouts, settings))["model_output"]["values"]
        for _ in range(3):
            with engine.train_mode():
                engine.train_batch(data_of(rollouts, settings), loss_function=critic_loss)
        found.append({**weights_of(engine), "values": torch.cat(values.unbind())})
    assert largest_difference(*found) < 3e-6
    assert (found[1]["score.weight"] - start["score.weight"]).abs().max() > 3e-4
    assert dta_compile.last_plan(engine.token_values).stats.compression > 1.5


def test_configuration_alone_chooses_the_engine():
    """As verl's workers read their configuration: the actor's strategy becomes that of its engine."""
    assert actor_of("dta", Settings()).engine.strategy == "dta"
    fsdp = {"_target_": "dta_compile.integrations.verl_engine.DTAEngineConfig", "dta": {"chunk_size": 4096}}
    actor = {"strategy": "dta", "rollout_n": 1, "use_dynamic_bsz": True, "fsdp_config": fsdp}
    made = omega_conf_to_dataclass({"_target_": "verl.workers.config.FSDPActorConfig", **actor})
    assert isinstance(made, FSDPActorConfig)
    assert isinstance(made.engine, DTAEngineConfig)
    assert (made.engine.strategy, made.engine.dta) == ("dta", {"chunk_size": 4096})


def test_options_are_checked():
    with pytest.raises(OptionError, match="chunk_size"):
        DTAEngineConfig(dta={"chunk_sise": 1})
    with pytest.raises(OptionError, match="strategy"):
        DTAEngineConfig(strategy="fsdp")


@pytest.mark.parametrize(
    ("engine", "model", "name"),
    [
        ({"ulysses_sequence_parallel_size": 2}, {}, "ulysses_sequence_parallel_size"),
    ],
)
def test_settings_that_do_not_work_are_refused_by_name(checkpoint, engine, model, name):
    with pytest.raises(OptionError, match=name) as found:
        engine_of("dta", checkpoint, Settings(engine=engine, model=model))
    assert found.value.hint


def test_settings_that_only_change_how_a_model_is_computed_have_no_effect(checkpoint, rollouts, caplog):
    model = {"use_fused_kernels": True, "use_liger": True, "enable_activation_offload": True}
    settings = Settings(rows=2, entropy=0.01, model=model)
    engine = engine_of("dta", checkpoint, settings)
    assert [name for name in model if f"model.{name} has no effect" in caplog.text] == list(model)
    data = data_of(rollouts, settings)
    tensordict_utils.assign_non_tensor(data, use_fused_kernels=True)  # as verl's workers tell it
    with engine.eval_mode():
        found = engine.infer_batch(data)["model_output"]
    with (plain := engine_of(REFERENCE, checkpoint, Settings(rows=2, entropy=0.01))).eval_mode():
        expected = plain.infer_batch(data_of(rollouts, settings))["model_output"]
    for name, values in expected.items():
        for mine, theirs in zip(found[name].unbind(), values.unbind(), strict=True):
            torch.testing.assert_close(mine[:-1], theirs[:-1])


@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
def test_top_k_distillation(checkpoint, rollouts, remove_padding):
    """verl's loss as its workers bind it, alone and beside a policy gradient; two updates of each."""
    settings, found = Settings(remove_padding=remove_padding, rows=len(rollouts), temperature=0.9), []
    generator = torch.Generator().manual_seed(4)
    log = [torch.randn(len(one), VOCABULARY, generator=generator).log_softmax(-1).topk(5) for one in rollouts]
    teacher = {
        name: torch.nested.as_nested_tensor([getattr(one, entry) for one in log], layout=torch.jagged)
        for name, entry in (("teacher_ids", "indices"), ("teacher_logprobs", "values"))
    }
    for strategy in (REFERENCE, "dta"):
        engine, reports = engine_of(strategy, checkpoint, settings), []
        start = weights_of(engine)
        for is_alone in (True, False, True, False):
            how = DistillationLossConfig(
                loss_mode="forward_kl_topk", topk=5, use_policy_gradient=False, use_task_rewards=not is_alone,
                log_prob_min_clamp=-4.0,
            )  # fmt: skip
            loss = functools.partial(
                distillation_ppo_loss, config=actor_of(REFERENCE, settings),
                distillation_config=types.SimpleNamespace(distillation_loss=how),
            )  # fmt: skip
            data = data_of(rollouts, settings)
            tensordict_utils.assign_non_tensor(data, distillation_use_topk=True, distillation_only=is_alone)
            data.update(teacher)
            with engine.train_mode():
                output = engine.train_batch(data, loss_function=loss)
            reports += [output["metrics"][f"distillation/{name}"] for name in ("student_mass", "overlap_ratio")]
            reports += [sum(output["loss"])]
        found.append((weights_of(engine), reports))
    assert largest_difference(found[0][0], found[1][0]) < 3e-6
    assert all((found[0][0][name] - start[name]).abs().max() > 3e-4 for name in start)
    assert sum(map(np.mean, found[1][1])) == pytest.approx(sum(map(np.mean, found[0][1])), rel=1e-5)
    assert dta_compile.last_plan(engine.token_values).stats.compression > 1.5


@pytest.mark.parametrize("key", ["distillation_use_topk", "multi_modal_inputs"])
def test_data_that_does_not_work_is_refused(checkpoint, rollouts, key):
    settings = Settings()
    engine, data = engine_of("dta", checkpoint, settings), data_of(rollouts, settings)
    if key == "multi_modal_inputs":
        tensordict_utils.assign_non_tensor_stack(data, key, [{"image_bound": torch.zeros(1, 2)}] * len(rollouts))
    else:
        tensordict_utils.assign_non_tensor(data, **{key: True})
    with pytest.raises(RefusalError, match="dta"), engine.eval_mode():
        engine.infer_batch(data)


def test_flash_attention_is_ours(checkpoint, rollouts):
    """verl's default attention, whose package is for GPUs: in compiled functions it is the backend's."""
    settings = Settings(rows=2, entropy=0.01)
    eager, engine = (engine_of(strategy, checkpoint, settings) for strategy in (REFERENCE, "dta"))
    engine.module.config._attn_implementation = "flash_attention_2"
    found, expected = train(engine, rollouts, settings, steps=1), train(eager, rollouts, settings, steps=1)
    assert largest_difference(found.scores, expected.scores) < 3e-6
    assert largest_difference(found.weights, expected.weights) < 3e-6

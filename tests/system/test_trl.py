"""Trainers of TRL and transformers with one added line train to the same weights, over a prefix tree at every step."""

import importlib.util
import logging
import pathlib
import re
import sys

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl import GRPOConfig
from trl.kernels import ChunkedLogProbFunction

import dta_compile
from dta_compile.errors import OptionError
from dta_compile.integrations import trl_head
from dta_compile.integrations.trainer_callback import compressions, group_rows, positions_are_relative, with_positions
from tests.support import launched, trainers
from tests.support.families import build

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
@pytest.mark.parametrize("where", ["callback", pytest.param("backbone", marks=pytest.mark.slow)])
def test_grpo_trainer_ends_at_the_weights_of_eager(example, settings, eager, where):
    ours = example.train(settings, where=where)
    initial = dict(example.model(settings).named_parameters())
    assert all((value - initial[name]).abs().max() > 1e-6 for name, value in eager.weights.items())
    assert example.difference(eager, ours) < 2e-6
    assert ours.losses == pytest.approx(eager.losses, abs=1e-6)
    assert len({id(plan) for plan in ours.plans}) == STEPS, "every step's forward makes a plan"
    assert all(plan.stats.compression > 2 for plan in ours.plans)


SPLIT = {"per_device_train_batch_size": trainers.GROUP, "steps_per_generation": 2, "gradient_accumulation_steps": 2}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_callback_compiles_and_warns_once_of_groups_that_are_cut_apart(caplog):
    with caplog.at_level(logging.WARNING, logger="dta_compile"):
        ours = trainers.train(trainers.grpo, trainers.callback, **SPLIT)
    eager = trainers.train(trainers.grpo, **SPLIT)
    assert trainers.moved(eager) > 1e-3
    assert trainers.difference(eager, ours) < 1e-6
    (warning,) = [one.getMessage() for one in caplog.records if "all their rows in one batch" in one.getMessage()]
    assert "args=DTACallback.whole_steps(args) makes the same update from one batch" in warning
    assert len({id(plan) for plan in ours.plans}) == 2 * trainers.UPDATES, "every batch makes a plan"
    assert all(plan.stats.compression < 2 for plan in ours.plans), "groups that were not cut apart"
    whole = trainers.train(trainers.grpo, trainers.callback, adjust=dta_compile.DTACallback.whole_steps, **SPLIT)
    assert trainers.difference(eager, whole) < 1e-6
    assert len({id(plan) for plan in whole.plans}) == trainers.UPDATES, "every update makes a plan"
    assert all(plan.stats.compression > 2 for plan in whole.plans)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "plain"))])
def test_whole_steps_make_the_updates_of_accumulated_batches(way):
    make, settings = getattr(trainers, way), {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    eager = trainers.train(make, **settings)
    whole = trainers.train(make, trainers.callback, adjust=dta_compile.DTACallback.whole_steps, **settings)
    assert trainers.moved(eager) > 1e-3
    assert trainers.difference(eager, whole) < 1e-6
    assert len({id(plan) for plan in whole.plans}) == trainers.UPDATES


def test_batches_that_cannot_be_one_are_an_error():
    settings = {"output_dir": "none", "num_generations": 2, "use_cpu": True, "bf16": False}
    uneven = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 3}
    for other in ({"loss_type": "bnpo"}, uneven):
        with pytest.raises(OptionError, match="cannot be one batch"):
            dta_compile.DTACallback.whole_steps(GRPOConfig(**settings, **other))


@pytest.mark.filterwarnings("ignore")
def test_an_experimental_trainer_may_have_another_loss_than_its_arguments_say():
    from trl.experimental.orpo import ORPOConfig

    with pytest.raises(OptionError, match="cannot be one batch") as refused:
        dta_compile.DTACallback.whole_steps(ORPOConfig(output_dir="none", use_cpu=True, bf16=False))
    assert "ORPOConfig" in str(refused.value)


def test_a_loss_that_a_trainer_runs_as_the_forward_of_its_model_is_not_observed():
    """TRL's distillation calls the model with itself and a batch."""

    class Model(torch.nn.Linear):
        def forward(self, model, inputs, count):
            return model.weight.sum() * inputs["input_ids"].sum() / count

    model, callback = Model(2, 2).train(), dta_compile.DTACallback()
    model.compile(backend="eager")
    callback.on_train_begin(None, None, None, model=model)
    assert model(model, {"input_ids": torch.ones(2, 3)}, 2).shape == ()
    assert callback._batches == []


def grouped(trainer):
    trainer.add_callback(dta_compile.DTACallback(group_rows=True))
    return trainer.model


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rows_grouped_by_prefixes_share_and_come_again_when_training_is_resumed(tmp_path):
    """Pairs of answers to prompts, in six steps of four rows, which are of two epochs."""
    settings = {"train_sampling_strategy": "random", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"max_steps": 6, "save_strategy": "steps", "save_steps": 5}
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-5")):
        trainer, batches = trainers.plain(str(tmp_path), [], **settings), []
        collate = trainer.data_collator
        trainer.data_collator = lambda rows, collate=collate, batches=batches: batches.append(rows) or collate(rows)
        grouped(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append([[row["input_ids"] for row in batch] for batch in batches])
    whole, resumed = runs
    assert all(a[:8] == b[:8] for a, b in whole), "answers to one prompt"
    assert whole[:8] != whole[8:12] and resumed == whole[-len(resumed) :] and len(resumed) < len(whole)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("way", "settings"),
    [
        ("plain", {"train_sampling_strategy": "group_by_length"}),
        ("sft", {"train_sampling_strategy": "sequential"}),
        ("sft", {"packing": True, "max_length": 64, "train_sampling_strategy": "random"}),
        ("grpo", {"shuffle_dataset": False}),
    ],
)
def test_rows_are_not_grouped_against_another_order(way, settings):
    with pytest.raises(OptionError, match="rows cannot be grouped by their prefixes"):
        trainers.train(getattr(trainers, way), grouped, **settings)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_prompts_are_grouped_by_their_texts():
    """The beginnings of two sets of prompts alternate; a generation is of two prompts."""
    trainer = trainers.grpo("none", [])
    rows = [{"prompt": trainers.text([3 + i % 2, 5, 6, 7 + i])} for i in range(8)]
    trainer.train_dataset = trainers.Dataset.from_list(rows)
    loader = trainer.get_train_dataloader()
    sampler, seen = group_rows(trainer.args, loader), []
    for sampler.epoch in (0, 1):
        order = list(loader.batch_sampler.sampler)
        assert len(order) == len(loader.batch_sampler.sampler) == 8 * trainers.GROUP
        seen.append([order[i : i + 2 * trainers.GROUP : trainers.GROUP] for i in range(0, 8 * 4, 2 * trainers.GROUP)])
        assert all(a % 2 == b % 2 for a, b in seen[-1])
    assert seen[0] != seen[1]


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


WAYS = {
    "grpo": (trainers.grpo, {}),
    "grpo_lora": (trainers.grpo, {"peft_config": lora}),
    "grpo_checkpoints": (trainers.grpo, {"gradient_checkpointing": True}),
    "grpo_iterations": (trainers.grpo, {"steps_per_generation": 4, "num_iterations": 2}),
    "sft": (trainers.sft, {}),
    "sft_padding_free": (trainers.sft, {"padding_free": True, "max_length": None}),
    "sft_packing": (trainers.sft, {"packing": True, "max_length": 64, "per_device_train_batch_size": 2}),
    "dpo": (trainers.dpo, {}),
    "trainer": (trainers.plain, {}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("compiled", [trainers.callback, trainers.whole, trainers.backbone])
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_ends_at_the_weights_of_eager(way, compiled):
    make, settings = WAYS[way]

    def run(compiled):
        made = {name: value() if callable(value) else value for name, value in settings.items()}
        return trainers.train(make, compiled, **made)

    eager, ours = run(None), run(compiled)
    assert trainers.moved(eager) > 1e-3
    assert trainers.difference(eager, ours) < 1e-6
    assert ours.losses == pytest.approx(eager.losses, abs=1e-5)
    assert len({id(plan) for plan in ours.plans}) == trainers.UPDATES


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft", "dpo"))])
def test_a_trainer_with_images_ends_at_the_weights_of_eager(way):
    """Screens of episodes, whose encoder runs once for each; prompts of several lengths are padded on the left."""
    pytest.importorskip("PIL")
    from tests.support import screens

    make = getattr(screens, way)
    eager, ours = trainers.train(make), trainers.train(make, trainers.callback)
    assert trainers.moved(eager) > 1e-2
    assert trainers.difference(eager, ours) < 1e-6
    assert ours.losses == pytest.approx(eager.losses, abs=1e-5)
    assert len({id(plan) for plan in ours.plans}) == trainers.UPDATES
    assert all(plan.stats.compression > 1.7 for plan in ours.plans)
    units = [
        re.search(r"(\d+) images .*, (\d+) different and encoded", " ".join(plan.estimates.notes))
        for plan in ours.plans
    ]
    assert all(int(unit[2]) < 0.6 * int(unit[1]) for unit in units)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_mixed_precision_rounds_like_eager(monkeypatch):
    build = trainers.model
    monkeypatch.setattr(trainers, "model", lambda: build().float())
    exact = trainers.train(trainers.grpo)
    eager = trainers.train(trainers.grpo, bf16=True)
    ours = trainers.train(trainers.grpo, trainers.callback, bf16=True)
    assert trainers.rounding(exact, ours) < 1.2 * trainers.rounding(exact, eager)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["grpo", "sft", "dpo", "plain"])
def test_launched_by_accelerate_with_fsdp2(way):
    """Several batches an update and clipping, which go through FSDP2's own."""
    for rank in launched.launch(way, gradient_accumulation_steps=2, max_grad_norm=0.5):
        assert rank["wrapped"] > 2, "each layer by itself"
        assert rank["moved"] > 1e-3 and rank["difference"] < 1e-6
        assert min(rank["compression"]) > 1.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_prompts_of_different_lengths_share_their_beginning_only_with_the_callback():
    aligned = trainers.train(trainers.grpo, trainers.callback)
    by_column = trainers.train(trainers.grpo, trainers.backbone)
    for one, other in zip(aligned.plans, by_column.plans, strict=True):
        assert one.stats.tree_tokens == other.stats.tree_tokens - 4


@pytest.mark.parametrize(("softcap", "scale", "with_bias"), [(None, 1.0, False), (3.0, 0.5, True)])
def test_the_head_has_the_values_and_gradients_of_trl(monkeypatch, softcap, scale, with_bias):
    monkeypatch.setattr(trl_head, "BLOCK", 16)
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(size, generator=draw) for size in ((9, 8), (40, 8), (40,)))
    targets = torch.randint(40, (9,), generator=draw)
    targets[::2] = (hidden @ weight.T + (bias if with_bias else 0)).argmax(-1)[::2]
    wanted = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    seen = []
    for function in (trl_head.head, ChunkedLogProbFunction.apply):
        inputs = [one.clone().requires_grad_() for one in (hidden, weight, *([bias] if with_bias else []))]
        shift = inputs[2] if with_bias else None
        values = function(*inputs[:2], shift, targets, 0.7, 16, softcap, scale, wanted)
        (values[0] * torch.arange(9)).sum().add(values[1].sum()).backward()
        assert not any(value.requires_grad for value in values[2:])
        seen.append([*values, *(one.grad for one in inputs)])
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)
    assert seen[0][4][::2].all() and not seen[0][4].all()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_head_of_another_dtype_than_its_inputs_is_cast_as_by_trl(dtypes):
    """As PEFT's preparation for training in few bits leaves the head in float32."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 8, generator=draw).to(dtypes[0])
    head = [torch.randn(size, generator=draw).to(dtypes[1]).requires_grad_() for size in ((40, 8), (40,))]
    arguments = (torch.arange(9), 0.7, 16, None, 1.0, ("log_probs", "entropy", "mean_logits"))
    ours, expected = (function(hidden, *head, *arguments) for function in (trl_head.head, ChunkedLogProbFunction.apply))
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)
    gradients = [torch.autograd.grad(values[0].sum(), head) for values in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)


def test_what_is_not_wanted_of_the_head_is_not_computed():
    found = trl_head.head(
        torch.ones(2, 3), torch.ones(5, 3), None, torch.tensor([0, 1]), 1.0, 4, None, 1.0, ("log_probs",)
    )
    assert [one is None for one in found] == [False, True, True, True, True]


def test_positions_count_the_tokens_of_padded_rows():
    ids, mask = torch.ones(3, 4, dtype=torch.int64), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 0, 1]])
    found = with_positions({"input_ids": ids, "attention_mask": mask})["position_ids"]
    assert found.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 1, 2]], "as far apart as their columns"
    found = with_positions({"input_ids": ids, "attention_mask": mask}, has_axes=True)["position_ids"]
    assert found.tolist() == [[0, 0, 0, 1], [0, 1, 2, 2], [0, 0, 0, 1]]
    for others in ({"position_ids": mask}, {"past_key_values": object()}, {"attention_mask": None}):
        inputs = {"input_ids": ids, "attention_mask": mask, **others}
        assert with_positions(inputs) is inputs


@pytest.mark.parametrize(("name", "relative"), [("qwen3", True), ("gpt2", False), ("llama4", False)])
def test_positions_are_shifted_only_where_nothing_else_depends_on_them(name, relative):
    assert positions_are_relative(build(name)) == relative


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_positions_are_not_shifted_where_the_largest_one_chooses_frequencies(kind):
    model = build("qwen3")
    assert positions_are_relative(model)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": kind}
    assert not positions_are_relative(model)
    model.config.rope_parameters = {"full_attention": {"rope_type": kind}, "other": {"rope_type": "default"}}
    assert not positions_are_relative(model)


def test_compression_apart_and_together():
    assert compressions([[[1, 2, 3], [1, 2, 4]], [[1, 2, 3], [5]]]) == (10 / 8, 10 / 5)

"""What `DTACallback` adds to what trainers log, and how it calls models that take images."""

import types

import pytest
import torch
import transformers

import dta_compile
from dta_compile.errors import OptionError
from dta_compile.integrations.trainer_callback import _sequences, positions_are_relative
from tests.support import families, vision
from tests.support.tiny import TinyLM, shared_ids

ARGUMENTS = types.SimpleNamespace(gradient_accumulation_steps=1)
ARGUMENTS.per_device_train_batch_size = 4


def test_logs_get_the_figures_of_the_last_plan():
    torch._dynamo.reset()
    callback, model = dta_compile.DTACallback({"chunk_size": 8}), TinyLM(layers=1)
    before, during, after, evaluation = {"loss": 1.0}, {"loss": 1.0}, {"loss": 1.0}, {"eval_loss": 1.0}
    callback.on_train_begin(ARGUMENTS, None, None, model=model)
    callback.on_log(ARGUMENTS, None, None, logs=before)
    model(shared_ids(batch=4, tokens=12)).sum().backward()
    for logs in (during, evaluation):
        callback.on_log(ARGUMENTS, None, None, logs=logs)
    expected = dta_compile.last_plan(model).stats
    callback.on_train_end(ARGUMENTS, None, None)
    callback.on_log(ARGUMENTS, None, None, logs=after)
    assert during["dta/compression"] == expected.compression and during["dta/tokens"] == 48
    assert before == after == {"loss": 1.0} and evaluation == {"eval_loss": 1.0}


@pytest.fixture
def calls():
    """Arguments that reach the compiled call of a Qwen3-VL under the callback, and the model."""
    model, arguments = vision.build("qwen3_vl"), []
    model._compiled_call_impl = lambda **given: arguments.append(given)
    callback = dta_compile.DTACallback()
    callback.on_train_begin(ARGUMENTS, None, None, model=model)
    return types.SimpleNamespace(model=model, arguments=arguments, callback=callback)


def test_positions_of_images_are_the_models_own(calls):
    call = vision.inputs("qwen3_vl", [[5, "a", 7], [5, "a", 7, 8]])
    text = {name: call[name] for name in ("input_ids", "attention_mask")}
    calls.model(**call)
    calls.model(**text)
    (with_images, without) = calls.arguments
    assert "position_ids" not in with_images
    assert torch.equal(without["position_ids"][1], torch.arange(text["input_ids"].shape[1]))


def test_generation_is_not_compiled(calls):
    call = vision.inputs("qwen3_vl", [[5, "a", 7], [5, "a", 7, 8]])
    with torch.no_grad():
        outputs = calls.model.generate(**call, max_new_tokens=2, do_sample=False)
    assert outputs.shape[1] == call["input_ids"].shape[1] + 2 and not calls.arguments


def test_generation_after_training_is_not_compiled_either(calls):
    """And a second training with the same callback wraps the model's call once."""
    call = vision.inputs("qwen3_vl", [[5, "a", 7], [5, "a", 7, 8]])
    calls.callback.on_train_end(ARGUMENTS, None, None)
    with torch.no_grad():
        calls.model.generate(**call, max_new_tokens=2, do_sample=False)
    assert not calls.arguments
    once = calls.model._compiled_call_impl
    calls.callback.on_train_begin(ARGUMENTS, None, None, model=calls.model)
    assert calls.model._compiled_call_impl is once


def test_different_images_do_not_count_as_shared(calls):
    """Images of different sizes, between the same text; "d" has as many tokens as "a"."""
    for rows in ([[5, "a", 7], [5, "a", 7]], [[5, "a", 7], [5, "d", 7, "b"]]):
        calls.model(**vision.inputs("qwen3_vl", rows))
    arguments = types.SimpleNamespace(gradient_accumulation_steps=2, per_device_train_batch_size=2)
    calls.callback.on_step_end(arguments, None, None)
    assert (calls.callback.now, calls.callback.possible) == (20 / (4 + 11), 20 / 11)


class OfItsOwn(transformers.Qwen3ForCausalLM):
    """A model whose author may do anything with positions."""


def test_positions_are_shifted_only_where_nothing_else_is_known_to_read_them():
    model = families.build("qwen3")
    assert positions_are_relative(model) and not positions_are_relative(TinyLM(layers=1))
    assert not positions_are_relative(OfItsOwn(model.config))
    model.config.model_type = "beam"  # scales queries by their position
    assert not positions_are_relative(model)
    peft = pytest.importorskip("peft")
    lora = peft.get_peft_model(families.build("qwen3"), peft.LoraConfig(target_modules=["q_proj"]))
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert positions_are_relative(lora)
    assert not positions_are_relative(
        peft.get_peft_model(families.build("qwen3"), prefix)
    )  # its keys are at no position


def test_masks_of_pairs_and_by_kind_of_layer_leave_rows_whole():
    ids = torch.tensor([[5, 6, 7], [5, 6, 8]])
    square = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    for mask in (square, {"full_attention": square}):
        assert [row.tolist() for row in _sequences(ids, mask)] == ids.tolist()


@pytest.mark.parametrize(
    "setting",
    [
        *({"loss_type": kind} for kind in ("bnpo", "kto", ["sigmoid", "aot"], "sft")),
        *({"top_entropy_quantile": 0.2}, {"entropy_coef": 0.1}),
    ],
)
def test_batches_whose_loss_is_of_each_as_a_whole_cannot_be_one(setting):
    usual = {"loss_type": "dapo", "steps_per_generation": 4, "top_entropy_quantile": 1.0, "entropy_coef": 0.0}
    usual |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert dta_compile.DTACallback.whole_steps(types.SimpleNamespace(**usual)).per_device_train_batch_size == 8
    with pytest.raises(OptionError, match="cannot be one batch"):
        dta_compile.DTACallback.whole_steps(types.SimpleNamespace(**usual | setting))

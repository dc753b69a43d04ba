"""What `DTACallback` adds to what trainers log."""

import types

import torch

import dta_compile
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

"""SkyRL's model, which makes log-probs and entropies of logits, trains to the same weights over a prefix tree."""

import copy
import pathlib
import typing

import pytest
import torch

pytest.importorskip("skyrl")

from transformers import Qwen3Config, Qwen3ForCausalLM

import dta_compile

PACKAGES = pathlib.Path(__file__).parents[1] / "support" / "packages"  # a stand-in for flash-attn
ANSWER = 8


def update(model, step):
    """One policy gradient with an entropy bonus on rows with padding on either side."""
    draw = torch.Generator().manual_seed(step)
    ids, mask = torch.randint(3, 64, (6, 20), generator=draw), torch.ones(6, 20, dtype=torch.int64)
    ids[:, :12] = ids[0, :12]
    mask[1, :2] = mask[2, 17:] = 0
    answers = mask[:, -ANSWER:]
    log_probs, output = model(
        ids, ANSWER, mask, temperature=0.9, compute_entropy=True, entropy_requires_grad=True, return_output=True
    )
    advantages = torch.randn(6, 1, generator=draw, dtype=torch.float64)
    entropies = output["entropy"][:, -ANSWER - 1 : -1]
    loss = (-(log_probs * advantages) * answers).sum() / answers.sum() - 0.01 * (entropies * answers).mean()
    loss.backward()


def test_skyrl_ends_at_the_weights_of_its_own_path(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES))
    extensions = pytest.importorskip("typing_extensions")
    monkeypatch.setattr(typing, "TypedDict", extensions.TypedDict)  # which pydantic asks for before Python 3.12
    wrapper = pytest.importorskip("skyrl.backends.skyrl_train.workers.model_wrapper")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    base, found = Qwen3ForCausalLM(Qwen3Config(**heads, **sizes)).double(), []
    for is_compiled in (False, True):
        model = wrapper.HFModelWrapper(copy.deepcopy(base), bf16=False)
        if is_compiled:
            model.model.compile(backend="dta", options={"codegen": "eager"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            update(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(dict(model.named_parameters()))
    eager, ours = found
    assert max(float((eager[name] - value).abs().max()) for name, value in ours.items()) < 1e-7
    assert dta_compile.last_plan(model.model).stats.compression > 1.7

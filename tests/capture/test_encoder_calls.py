"""Models with images are captured as one graph, in which encoders and positions are single nodes."""

import pytest
import torch
from torch import nn

import dta_compile.backend  # noqa: F401  # has methods of models replaced
from dta_compile.capture import dynamo
from dta_compile.capture.encoder_calls import encode, token_positions
from dta_compile.errors import RefusalError
from tests.support.vision import FAMILIES, PACKED, build, inputs

ROWS = [[5, "a", 7, 3], [5, "b", 7, "a"]]


class Graphs(list):
    """A backend that runs graphs as captured, and keeps them."""

    __module__ = "dta_compile.tests"  # of this package, so that Dynamo traces as for the tree

    def __call__(self, module, example_inputs):
        dynamo.trace_again_with_symbolic_sizes(module.graph)
        self.append(module)
        return module

    def calls(self, target):
        return [node for module in self for node in module.graph.find_nodes(op="call_function", target=target)]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    torch._dynamo.trace_rules.clear_lru_cache()  # as whatever runs before may do


QUICK = ("qwen3_vl", "llava")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_models_are_one_graph(name):
    model, graphs = build(name), Graphs()
    compiled = torch.compile(model, backend=graphs)
    for rows in (ROWS, [*ROWS, ["a", 3, "c", 9, 8]]):
        expected = model(**inputs(name, rows)).logits
        torch.testing.assert_close(compiled(**inputs(name, rows)).logits, expected, rtol=0, atol=1e-9)
    assert len(graphs) == len(graphs.calls(encode)) == 1
    assert dynamo.graph_break(graphs[0]) is None
    assert len(graphs.calls(token_positions)) == (name in PACKED)
    (call,) = graphs.calls(encode)
    assert all(level.requires_grad and level.dim() == 2 for level in call.meta["example_value"])


def test_a_graph_belongs_to_its_model_and_to_what_it_trains():
    models, graphs = [build("llava") for _ in range(2)], Graphs()
    with torch.no_grad():
        models[1].model.multi_modal_projector.linear_2.bias.add_(1)
    call = inputs("llava", ROWS)
    for model in models:
        torch.testing.assert_close(torch.compile(model, backend=graphs)(**call).logits, model(**call).logits)
    models[1].requires_grad_(False)
    compiled = torch.compile(models[1], backend=graphs)
    assert not compiled(**call).logits.requires_grad
    models[1].model.vision_tower.encoder.layers[0].mlp.fc1.bias.requires_grad_()
    compiled(**call).logits.sum().backward()
    assert models[1].model.vision_tower.encoder.layers[0].mlp.fc1.bias.grad.any()


def test_pixels_are_computed_in_the_graph():
    model, graphs, call = build("llava"), Graphs(), inputs("llava", ROWS)

    def run(pixel_values, **others):
        return model(pixel_values=pixel_values.clamp(max=pixel_values.shape[0]).sin(), **others).logits

    torch.testing.assert_close(torch.compile(run, backend=graphs)(**call), run(**call), rtol=0, atol=1e-9)
    assert len(graphs.calls(encode)) == 1


def test_dropout_and_batch_norm_of_encoders_are_refused_by_name():
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(32).double()):
        torch.compiler.reset()
        model = build("llava")
        model.model.multi_modal_projector.act = nn.Sequential(
            nn.GELU(), nn.Flatten(0, 1), layer, nn.Unflatten(0, (-1, 4))
        )
        with pytest.raises(RefusalError, match="depend on the other images of the batch"):
            torch.compile(model, backend="dta")(**inputs("llava", ROWS))

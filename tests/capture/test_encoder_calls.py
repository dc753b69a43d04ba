"""Models with images are captured as one graph, in which encoders and positions are single nodes."""

import pytest
import torch
import transformers
from torch import nn

import dta_compile.backend  # noqa: F401  # has methods of models replaced
from dta_compile.capture.dynamo import breaks, sizes
from dta_compile.capture.media.encoder_calls import encode, token_positions
from dta_compile.capture.media.encoder_cut import without_encoder_calls
from dta_compile.errors import RefusalError
from tests.support.vision import FAMILIES, IMAGE, PACKED, build, inputs

ROWS = [[5, "a", 7, 3], [5, "b", 7, "a"]]


class Graphs(list):
    """A backend that runs graphs as captured, and keeps them."""

    __module__ = "dta_compile.tests"  # of this package, so that Dynamo traces as for the tree

    def __call__(self, module, example_inputs):
        sizes.trace_again_with_symbolic_sizes(module.graph)
        self.append(module)
        return module

    def calls(self, target):
        return [node for module in self for node in module.graph.find_nodes(op="call_function", target=target)]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    torch._dynamo.trace_rules.clear_lru_cache()  # as whatever runs before may do


QUICK = ("qwen3_vl",)


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
    assert breaks.graph_break(graphs[0]) is None
    assert len(graphs.calls(token_positions)) == (name in PACKED)
    (call,) = graphs.calls(encode)
    assert all(level.requires_grad and level.dim() == 2 for level in call.meta["example_value"])


@pytest.mark.slow
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


class Scaled(transformers.LlavaModel):
    """Features that are scaled by parameters of other modules than those that it calls."""

    def get_image_features(self, *args, **kwargs):
        output = super().get_image_features(*args, **kwargs)
        scales = self.scale * self.unused.weight * self.language_model.embed_tokens.weight[3]
        output.pooler_output = [self.bypassed.forward(features * scales) for features in output.pooler_output]
        return output


@pytest.mark.slow
def test_features_need_a_gradient_for_parameters_wherever_they_belong():
    model, graphs, pixels = build("llava").model, Graphs(), inputs("llava", ROWS)["pixel_values"]
    model.__class__ = Scaled
    model.scale = nn.Parameter(torch.rand(32, dtype=torch.float64))
    model.unused, model.bypassed = nn.LayerNorm(32).double(), nn.Linear(32, 32).double()
    compiled = torch.compile(lambda pixels: model.get_image_features(pixels).pooler_output[0].sin(), backend=graphs)
    read = ("scale", "unused.weight", "bypassed.bias", "language_model.embed_tokens.weight")
    for name in (None, *read, "unused.bias"):
        model.requires_grad_(False)
        if name is not None:
            model.get_parameter(name).requires_grad_()
        compiled(pixels)
        if name != "unused.bias":
            (features,) = graphs.calls(encode)[-1].meta["example_value"]
            assert features.requires_grad == (name in read)
    assert len(graphs) == 1 + len(read)


def test_pixels_are_computed_in_the_graph():
    model, graphs, call = build("llava"), Graphs(), inputs("llava", ROWS)

    def run(pixel_values, **others):
        return model(pixel_values=pixel_values.clamp(max=pixel_values.shape[0]).sin(), **others).logits

    torch.testing.assert_close(torch.compile(run, backend=graphs)(**call), run(**call), rtol=0, atol=1e-9)
    assert len(graphs.calls(encode)) == 1


@pytest.mark.slow
def test_dropout_and_batch_norm_of_encoders_are_refused_by_name():
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(32).double()):
        torch.compiler.reset()
        model = build("llava")
        model.model.multi_modal_projector.act = nn.Sequential(
            nn.GELU(), nn.Flatten(0, 1), layer, nn.Unflatten(0, (-1, 4))
        )
        with pytest.raises(RefusalError, match="depend on the other images of the batch"):
            torch.compile(model, backend="dta")(**inputs("llava", ROWS))


def test_calls_that_are_no_nodes_of_the_graph_run_as_they_are():
    """In a checkpoint, with pixels in a dictionary, without pixels, and where Python runs while Dynamo traces."""
    model, pixels = build("llava").model, inputs("llava", ROWS)["pixel_values"]

    class Model(type(model)):
        def get_image_features(self, pixel_values=None, batch=None):
            pixel_values = self.pixels if pixel_values is None and batch is None else pixel_values
            return super().get_image_features(batch["pixels"] if batch else pixel_values, return_dict=True)

    model.__class__ = Model
    model.register_buffer("pixels", pixels)

    def features(*args, **kwargs):
        return torch.cat(list(model.get_image_features(*args, **kwargs).pooler_output))

    calls = {
        "checkpoint": lambda pixels: torch.utils.checkpoint.checkpoint(features, pixels, use_reentrant=False),
        "dictionary": lambda pixels: features(batch={"pixels": pixels}),
        "buffer": lambda pixels: features(),
        "constant": lambda pixels: constant() * 1,
    }
    constant = torch._dynamo.assume_constant_result(lambda: features(inputs("llava", ROWS)["pixel_values"]).detach())
    for name, call in calls.items():
        found = torch.compile(call, backend=Graphs())(pixels)
        torch.testing.assert_close(found, features(pixels), rtol=0, atol=1e-9, msg=name)


class Cuts(Graphs):
    """A backend that cuts calls of encoders out of graphs, and keeps what it gets, or the refusal."""

    __module__ = Graphs.__module__

    def __call__(self, module, example_inputs):
        try:
            self.append(without_encoder_calls(module))
        except RefusalError as refusal:
            self.append(refusal)
        return module


WRITES = {
    "scaled": (True, lambda features, put: (features.mul_(2), put())[1]),
    "scaled behind": (True, lambda features, put: (put(), features.mul_(2))[0]),
    "scaled behind, and returned": (False, lambda features, put: (put(), features.mul_(2), features)[::2]),
    "scaled between": (False, lambda features, put: (put(), features.view(-1).mul_(2), put())[::2]),
    "a part": (False, lambda features, put: (features[:2].mul_(2), put())[1]),
    "by one another": (False, lambda features, put: (features.mul_(features.amax()), put())[1]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", WRITES)
def test_writes_to_features_of_methods(how):
    """What is written once for equal images has to be the same for each of them, and for each read."""
    model, cuts, (is_known, write) = build("llava").model, Cuts(), WRITES[how]

    def call(input_ids, pixel_values, **others):
        x = model.get_input_embeddings()(input_ids)
        mask = (input_ids == IMAGE)[..., None].expand(-1, -1, x.shape[-1])
        features = torch.cat(model.get_image_features(pixel_values).pooler_output)
        return write(features, lambda: x.masked_scatter(mask, features))

    torch.compile(call, backend=cuts)(**inputs("llava", ROWS))
    (cut,) = cuts
    if is_known:
        assert bool(cut.before.graph.find_nodes(op="call_method", target="mul_")) == (how == "scaled")
    else:
        assert "not known to read each one at its token" in str(cut)


def test_features_are_not_made_up_outside_of_the_trace():
    graphs, call = Graphs(), inputs("llava", ROWS)
    model = build("llava").model
    torch.compile(lambda pixels: model.get_image_features(pixels).pooler_output[0].sin(), backend=graphs)(
        call["pixel_values"]
    )
    fake = [node.meta["example_value"] for node in graphs[0].graph.find_nodes(op="placeholder")]
    with pytest.raises(RefusalError, match="tensors without values"):
        graphs[0](*fake)

"""Methods that make features run once per distinct image, with the values and gradients of all images together."""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.runtime.encoders.encoder import Encoder
from dta_compile.runtime.encoders.method_calls import TENSOR, Arguments
from dta_compile.runtime.encoders.modules import EncoderModule
from tests.support.helpers import EXACT, FLOAT32_ISLANDS
from tests.support.vision import FAMILIES, GRIDS, PACKED, build, inputs

ROWS = [[5, "a", 7], [5, "b", 7, "a"], [3, 4], ["b", 2, "c", 6]]
FLOAT32 = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm46v", "gemma3", "mistral3"}  # compute norms or rotations in it


def encoder_of(model, call):
    names = [name for name in ("pixel_values", "image_grid_thw", "image_sizes") if name in call]
    keyword = (*((name, TENSOR) for name in names), ("return_dict", True))
    encoder = Encoder(model, type(model).get_image_features, Arguments((), keyword))
    encoder.kept = model  # which encoders do not keep
    return encoder, [call[name] for name in names]


# Gemma 4 rotates in float32, which differs by more between batches of images: it is compared as a whole elsewhere.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma4"])
def test_distinct_images_are_all_images(name):
    model, call = build(name).model, inputs(name, ROWS)
    encoder, tensors = encoder_of(model, call)
    features, rows = encoder.distinct(*tensors)
    every = encoder(*tensors)
    assert (encoder.units, encoder.runs) == (5, 3)
    assert [len(level) for level in every] == [len(rows)] * len(features)
    weights = [torch.randn(level.shape, dtype=torch.float64) for level in every]
    tower = [weight for part in encoder.form.modules for weight in model.get_submodule(part).parameters()]
    found, expected = (
        torch.autograd.grad(
            sum((w * x).sum() for w, x in zip(weights, levels, strict=True)), tower, materialize_grads=True
        )
        for levels in ([level[rows] for level in features], every)
    )
    for one, other in zip(features, every, strict=True):
        torch.testing.assert_close(one[rows], other, rtol=0, atol=EXACT)
    tolerance = FLOAT32_ISLANDS if name in FLOAT32 else EXACT
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class Model(nn.Module):
    """Features of images `[N, 3]` by a layer, made by `make`."""

    def __init__(self, make=None, layer=None):
        super().__init__()
        self.layer, self.make = layer or nn.Linear(3, 4).double(), make

    def get_image_features(self, pixel_values, image_grid_thw=None, **others):
        features = self.layer(pixel_values)[:, None]
        return SimpleNamespace(pooler_output=self.make(features) if self.make else features)


def test_images_differ_by_one_bit_and_by_grid():
    pixels = torch.randn(1, 3, dtype=torch.float64).repeat(4, 1)
    pixels[1, 2] = pixels[1, 2].nextafter(pixels.new_tensor(9.0))
    encoder, _ = encoder_of(Model(), {"pixel_values": pixels})
    assert encoder.distinct(pixels)[1].tolist() == [0, 1, 0, 0]
    call = inputs("qwen2_vl", [["b", "b"]])
    half = len(call["pixel_values"]) // 2
    call["image_grid_thw"] = torch.tensor([GRIDS[1], (1, 2, 8)])
    encoder, tensors = encoder_of(build("qwen2_vl").model, call)
    assert encoder.distinct(*tensors)[1].tolist() == list(range(half // 2))


class OfRealPatches(Model):
    """Features of patches `[N, P, 3]` of images, or of tiles `[B, n, 1, 1, 3]` of rows, that a mask says are real."""

    def get_image_features(self, pixel_values, pixel_attention_mask):
        rows = zip(self.layer(pixel_values), pixel_attention_mask, strict=True)
        return SimpleNamespace(pooler_output=[row[mask].flatten(0, -2) for row, mask in rows])


@pytest.mark.parametrize(("shape", "units"), [((3, 4, 3), (3, 2)), ((3, 4, 1, 1, 3), (1, 1))])
def test_a_mask_says_which_patches_or_tiles_are_real(shape, units):
    pixels = torch.randn(shape, dtype=torch.float64)
    pixels[1], pixels[2, 1] = pixels[0], 0  # an image twice; a tile that is black
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    model = OfRealPatches()
    encoder = Encoder(model, type(model).get_image_features, Arguments((TENSOR, TENSOR), ()))
    (features,), rows = encoder.distinct(pixels, mask)
    assert (encoder.units, encoder.runs) == units
    torch.testing.assert_close(features[rows], *encoder(pixels, mask), rtol=0, atol=EXACT)


class Averaging(nn.Linear):
    """Keeps an average of what it is given, and writes the same number to another buffer."""

    def __init__(self):
        super().__init__(3, 4, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("known", torch.tensor(0.5))

    def forward(self, x):
        self.known = torch.tensor(0.5)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Model(lambda x: x - x.mean(0)), "of an image alone"),
        (lambda: Model(lambda x: torch.cat([x - x.mean(0), x.sign() / 0], -1)), "of an image alone"),
        (lambda: Model(layer=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()), "batch norm"),
        (lambda: Model(layer=nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).double()), "random"),
        (lambda: Model(layer=Averaging()), "buffer layer.mean"),
        (lambda: (model := Model(lambda x: x * (np.random.rand() if model.training else 1))), "random"),
        (lambda: (model := Model(lambda x: x * 0 if model.training and random.random() > 2 else x)), "random"),
    ],
)
def test_images_that_depend_on_more_than_themselves_are_refused(model, why):
    torch.manual_seed(0)
    model, pixels = model(), torch.randn(3, 3, dtype=torch.float64)
    encoder, tensors = encoder_of(model, {"pixel_values": pixels})
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    state = torch.get_rng_state()
    if why == "of an image alone":
        encoder.distinct(pixels[:1])  # which shows nothing
    with pytest.raises(RefusalError, match=why):
        encoder.distinct(*tensors)
    assert all(torch.equal(value, statistics[name]) for name, value in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())
    if why != "of an image alone":
        model.eval()
        encoder.distinct(*tensors)


def test_dropout_that_is_raised_later_is_refused():
    model, pixels = Model(layer=nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0)).double()), torch.ones(4, 3).double()
    encoder, tensors = encoder_of(model, {"pixel_values": pixels})
    encoder.distinct(*tensors)
    model.layer[1].p = 0.5
    with pytest.raises(RefusalError, match="random"):
        encoder.distinct(*tensors)


def test_images_are_encoded_one_by_one_where_features_do_not_say_their_image():
    """Features of all images in one tensor (Voxtral), and more entries for an image than one."""
    pixels = torch.randn(2, 3, dtype=torch.float64)[[0, 1, 0]]
    twice = lambda x: torch.cat([x, x[:, :1].exp()], 1)  # noqa: E731
    for make in (lambda x: twice(x).flatten(0, 1), lambda x: [part for image in twice(x) for part in image.split(1)]):
        encoder, tensors = encoder_of(Model(make), {"pixel_values": pixels})
        features, rows = encoder.distinct(*tensors)
        assert rows.tolist() == [0, 1, 2, 3, 0, 1] and "3 images (or other media), 2 different" in encoder.note
        torch.testing.assert_close(features[0][rows], encoder(*tensors)[0])


@dataclasses.dataclass
class Masked(ModelOutput):
    pooler_output: torch.Tensor | None = None
    used: torch.Tensor | None = None


def test_vectors_beside_features_are_others():
    """As those of Ovis 2 for the tokens around an image, which a model reads, but not what its encoder keeps."""

    @dataclasses.dataclass
    class Output(Masked):
        high_res_last_hidden_state: torch.Tensor | None = None

    class Indicating(Model):
        def get_image_features(self, pixel_values, **others):
            features = super().get_image_features(pixel_values).pooler_output
            return Output(features, self.layer.weight if self.make else None, features)

    for make in (None, lambda features: features):
        encoder, tensors = encoder_of(Indicating(make), {"pixel_values": torch.randn(2, 3, dtype=torch.float64)})
        encoder.learn(tensors)
        assert encoder.form.has_others == (make is not None)


def test_features_that_a_mask_selects():
    """Of sounds `[N, 3]` by their lengths, as those of Gemma 4."""

    class Sounds(Model):
        def get_image_features(self, pixel_values, lengths):
            features = super().get_image_features(pixel_values).pooler_output.repeat(1, 3, 1)
            features = features * torch.arange(1, 4)[:, None]
            return Masked(features, torch.arange(3) < lengths[:, None])

    model, sounds = Sounds(), torch.randn(2, 3, dtype=torch.float64)[[0, 1, 0, 0]]
    lengths = torch.tensor([2, 3, 2, 1])
    encoder = Encoder(model, Sounds.get_image_features, Arguments((TENSOR, TENSOR), ()))
    (features, mask), rows = encoder.distinct(sounds, lengths)
    output = model.get_image_features(sounds, lengths)
    torch.testing.assert_close(features[rows], output.pooler_output[output.used])
    assert mask.all() and len(mask) == 6 and (encoder.units, encoder.runs) == (4, 3)


class Putting(nn.Module):
    """Puts features of sounds `[N, T, 3]` of some lengths at tokens with the id 7, as Phi-4-multimodal does."""

    def __init__(self, after=lambda tokens: tokens):
        super().__init__()
        self.layer, self.after = nn.Linear(3, 4).double(), after

    def forward(self, input_ids, inputs_embeds, sounds, lengths):
        features = torch.cat([self.layer(sound[:length]) for sound, length in zip(sounds, lengths, strict=True)])
        places = torch.nonzero(input_ids == 7, as_tuple=True)
        return self.after(inputs_embeds.index_put(indices=places, values=features, accumulate=False))


def test_features_that_a_module_puts_at_tokens_itself():
    ids = torch.tensor([[7, 7, 1, 7, 7], [7, 2, 7, 7, 3]])
    sounds, lengths = torch.randn(2, 2, 3, dtype=torch.float64)[[0, 1, 0, 0]], torch.tensor([2, 2, 2, 1])
    arguments = (("input_ids", TENSOR), ("inputs_embeds", (4, torch.float64)), ("sounds", TENSOR), ("lengths", TENSOR))
    for after, is_put in ((nn.Dropout(0.0), True), (torch.tanh, False), (lambda tokens: tokens.roll(1, 0), False)):
        module = Putting(after)
        encoder = EncoderModule(module, Putting.forward, Arguments((), arguments))
        encoder.learn((ids, sounds, lengths))
        assert encoder.token == (7 if is_put else None)
        if is_put:
            (features,), rows = encoder.distinct(ids, sounds, lengths)
            assert (encoder.units, encoder.runs) == (4, 3)
            found = torch.zeros(2, 5, 4, dtype=torch.float64).index_put((ids == 7,), features[rows])
            torch.testing.assert_close(found, module(ids, found, sounds, lengths), rtol=0, atol=0)
            encoder.distinct(ids.roll(1, 1), sounds, lengths)
            encoder.token = 1
            with pytest.raises(RuntimeContractError, match="at other tokens"):
                encoder.distinct(ids, sounds, lengths)


def test_rows_without_images_and_videos_of_several_frames():
    call = inputs("idefics3", [[1, 2], ["a", 3, "a"], [4, "b"]])
    encoder, tensors = encoder_of(build("idefics3").model, call)
    assert (len(encoder.distinct(*tensors)[1]), encoder.units, encoder.runs) == (12, 3, 2)
    assert "glm46v" in PACKED
    model, pixels = build("glm46v").model, inputs("glm46v", [["b"]])["pixel_values"]
    method = type(model).get_video_features
    encoder = Encoder(model, method, Arguments((TENSOR, TENSOR), (("return_dict", True),)))
    rows = encoder.distinct(pixels.repeat(4, 1), torch.tensor([(2, 4, 4), (2, 4, 4)]))[1]
    assert rows.tolist() == [*range(8), *range(8)]

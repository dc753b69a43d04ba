"""Multimodal models: each distinct image is encoded once, and tokens of equal images share."""

import dataclasses
import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

import dta_compile
from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.runtime.encoders import distinct_media as encoders
from tests.support.tiny import WIDTH, BareLM, after, assert_same, weighted

IMAGE, PATCHES, SIZE, KINDS = 30, 2, 4, 3  # id of placeholders, tokens of an image, its height and width, images drawn


class Tower(nn.Module):
    """Images `[N, 1, 4, 4]` to features `[N, 2, D]`: a convolution over patches, and attention between them."""

    def __init__(self, width):
        super().__init__()
        self.patches = nn.Conv2d(1, width, (SIZE, SIZE // PATCHES), stride=SIZE // PATCHES)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, pixels):
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        heads = self.norm(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return self.out(x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))


class Reader(BareLM):
    """Puts features at placeholders, and once more behind the embeddings: in the spelling `put`."""

    def __init__(self, put="scatter"):
        super().__init__()
        torch.manual_seed(3)
        self.tower, self.put = Tower(self.embedding.embedding_dim).double(), put

    def encode(self, pixels):
        return self.tower(pixels)

    def forward(self, ids, pixels):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        features, mask = self.encode(pixels), ids == IMAGE
        if self.put == "scatter":
            x = x.masked_scatter(mask.unsqueeze(-1).expand_as(x), features)
        elif self.put == "write":
            x = x.clone()
            x[mask] = features.flatten(0, 1)
        elif self.put == "put":
            x = x.index_put((mask,), features.flatten(0, 1))
        else:
            x = x.clone()
            x[mask, :] = x[mask, :] + features.flatten(0, 1)
        return self.head(self.mix(x))


def rows_of(layout):
    """Ids `[B, S]` and pixels of rows that are lists of text ids and names of images, padded by text."""
    drawn = torch.randn(KINDS, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    drawn[2] = drawn[1]
    drawn[2, 0, -1, -1] += 1e-12  # differs in one pixel
    rows = [
        list(itertools.chain(*([IMAGE] * PATCHES if isinstance(part, str) else [part] for part in row)))
        for row in layout
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.stack([drawn["abc".index(part)] for row in layout for part in row if isinstance(part, str)])


def run(function, model):
    def step():
        out = function()
        weighted(out).backward()
        return out.detach()

    return after(model, step)


def one_by_one(model, ids, pixels):
    """Eager outputs, one row at a time, and gradients."""
    images = (ids == IMAGE).sum(1) // PATCHES
    return run(
        lambda: torch.cat([model(row[None], own) for row, own in zip(ids, pixels.split(images.tolist()), strict=True)]),
        model,
    )


def compiled_run(compiled, model, ids, pixels):
    return run(lambda: compiled(ids, pixels), model)


def tokens_run(compiled):
    return dta_compile.last_plan(compiled).prefix_tree.num_rows


@pytest.mark.parametrize("put", ["scatter", "write", "add"])
@pytest.mark.sample(1)
def test_equal_images_share_and_different_ones_fork(put):
    model = Reader(put)
    compiled = torch.compile(model, backend="dta")
    equal = rows_of([[1, "a", 2, "b", 3], [1, "a", 2, "b", 4], [1, "a", 2, "c", 3], [1, "b", 2, "a", 3]])
    assert_same(compiled_run(compiled, model, *equal), one_by_one(model, *equal))
    # 1 a2 2 b2 3 is seven tokens; a last token more; c forks where b began; and all behind 1.
    assert tokens_run(compiled) == 7 + 1 + 3 + 6
    assert "8 images (or other media), 3 different, 3 encoded" in str(dta_compile.last_plan(compiled))


@pytest.fixture(scope="module")
def reader():
    model = Reader()
    return model, torch.compile(model, backend="dta", options={"chunk_size": 3})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from([1, 2, "a", "b", "c"]), min_size=3, max_size=6), min_size=2, max_size=5))
def test_images_at_any_depth(reader, layout):
    model, compiled = reader
    if sum(isinstance(part, str) for row in layout for part in row) < 2:
        layout = [["a", "b", *row] for row in layout]
    batch = rows_of(layout)
    assert_same(compiled_run(compiled, model, *batch), one_by_one(model, *batch))


@pytest.mark.slow
def test_images_are_encoded_in_groups_that_fit_into_the_budget():
    model = Reader()
    compiled = torch.compile(model, backend="dta", options={"memory_budget": 0, "codegen": "eager"})
    for layout in ([[1, "a", 2, "b", 3], [1, "a", "c", "b", 4]], [["a", 1, "b", 2, "a", "c"], [1, "b", 2, "c"]]):
        batch = rows_of(layout)
        assert_same(compiled_run(compiled, model, *batch), one_by_one(model, *batch))
        (note,) = (note for note in dta_compile.last_plan(compiled).estimates.notes if "images" in note)
        assert "3 different" in note and "groups, and again in the backward" in note
    torch.compiler.reset()
    model = OverTheBatch()
    with pytest.raises(RefusalError, match="depend on the other images"):
        torch.compile(model, backend="dta", options={"memory_budget": 0})(*batch)


@pytest.mark.slow
def test_frozen_parts_and_scoring():
    model = Reader()
    compiled = torch.compile(model, backend="dta")
    batch = rows_of([[1, "a", 2, "b", 3], [1, "a", 2, "b", 4], [1, "a", 5, "a", 3]])
    for part in (model.tower, model.embedding, model.head):
        part.requires_grad_(False)
        assert_same(compiled_run(compiled, model, *batch), one_by_one(model, *batch))
        part.requires_grad_(True)
    with torch.no_grad():
        assert_same(compiled(*batch), model(*batch))


def test_a_batch_without_images():
    model = Reader()
    compiled = torch.compile(model, backend="dta")
    ids, pixels = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]), torch.zeros(0, 1, SIZE, SIZE, dtype=torch.float64)
    assert_same(*(run(lambda f=f: f(ids, pixels), model) for f in (compiled, model)))


def test_more_placeholders_than_features():
    model = Reader()
    compiled = torch.compile(model, backend="dta")
    ids, pixels = rows_of([[1, "a", 2, "b", 3], [1, "a", 2, "b", 4]])
    with pytest.raises(RuntimeContractError, match="not as many placeholder tokens as features"):
        compiled(ids, pixels[:3])


@pytest.mark.parametrize("put", ["scatter", "write", "put", "add"])
@pytest.mark.sample(1)
def test_more_features_than_placeholders(put):
    model = Reader(put)
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    ids, pixels = rows_of([[1, "a", 2, "b", 3], [1, "a", 2, "b", 4]])
    more = torch.cat([pixels, pixels[:1]])
    if put == "scatter":
        assert_same(*(run(lambda f=f: f(ids, more), model) for f in (compiled, model)))
        return
    with pytest.raises((RuntimeError, IndexError)):
        model(ids, more)
    with pytest.raises(RuntimeContractError, match="not as many placeholder tokens as features"):
        compiled(ids, more)


def test_features_that_are_added_to_what_index_put_finds_are_not_put_there():
    class Accumulating(Reader):
        def forward(self, ids, pixels):
            x = self.embedding(ids).index_put((ids == IMAGE,), self.encode(pixels).flatten(0, 1), accumulate=True)
            return self.head(self.mix(x))

    with pytest.raises(RefusalError):
        torch.compile(Accumulating(), backend="dta")(*rows_of([[1, "a", 2], [1, "b", 3]]))


class Writing(Reader):
    """Reads features twice, and calls `write` before, between and after."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, ids, pixels):
        x, mask = self.embedding(ids), (ids == IMAGE)[..., None].expand(-1, -1, WIDTH)
        features = self.encode(self.write("pixels", pixels * 1))
        self.write("before", features)
        x = x.masked_scatter(mask, features)
        self.write("between", features)
        x = x + torch.zeros_like(x).masked_scatter(mask, features.flatten(0, 1))
        self.write("after", features)
        return self.head(self.mix(x))


WRITES = {
    "method": lambda x: x.mul_(3),
    "view": lambda x: x[..., 0].mul_(3),
    "assignment": lambda x: operator.iadd(x.flatten(1), 3),
    "out": lambda x: torch.mul(x.detach(), 3, out=x.detach()),
    "inplace": lambda x: F.relu(x.detach(), inplace=True),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.sample(1)
def test_writes_to_features_count_for_reads_behind_them(how):
    def writing(*at):
        def write(place, value):
            if place in at:
                WRITES[how](value)
            return value

        model = Writing(write)
        torch.compiler.reset()
        return model, torch.compile(model, backend="dta", options={"codegen": "eager"})

    batch = rows_of([[1, "a", 2, "b", 3], [1, "a", 2, "b", 4], [1, "a", 5, "a", 3]])
    model, compiled = writing("pixels", "before", "after")
    assert_same(*(run(lambda f=f: f(*batch), model) for f in (compiled, model)))
    assert "6 images (or other media), 2 different" in str(dta_compile.last_plan(compiled))
    with pytest.raises(RefusalError, match="not known to read each one at its token"):
        writing("between")[1](*batch)


def test_writes_to_tokens_through_views():
    class Flat(Reader):
        def forward(self, ids, pixels):
            x = self.embedding(ids)
            x = x.masked_scatter((ids == IMAGE)[..., None].expand_as(x), self.encode(pixels))
            x.view(-1).mul_(2)
            return self.head(self.mix(x))

    model, batch = Flat(), rows_of([[1, "a", 2, "b", 3], [1, "a", 2, "b", 4]])
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    assert_same(*(run(lambda f=f: f(*batch), model) for f in (compiled, model)))


def test_features_of_more_than_pixels_are_not_features_of_images():
    """Equal images may have other features, by a write of values of ids; those of these ids do not show it."""

    class Named(Reader):
        def encode(self, pixels):
            features = self.tower(pixels)
            features[..., 0] = self.ids[: len(pixels), :1]
            return features

        def forward(self, ids, pixels):
            self.ids = ids.double()
            return super().forward(ids, pixels)

    with pytest.raises(RefusalError):
        torch.compile(Named(), backend="dta")(*rows_of([[1, "a", 2], [1, "b", 2], [1, "c", 3]]))


def test_writes_to_pixels_that_are_inputs_are_refused():
    model = Writing(lambda place, value: value)
    model.encode = lambda pixels: model.tower(pixels)
    compiled = torch.compile(lambda ids, pixels: model(ids, pixels.clamp_(max=1)), backend="dta")
    with pytest.raises(RefusalError, match="an input is written to in place before images are encoded"):
        compiled(*rows_of([[1, "a", 2], [1, "b", 3]]))


@pytest.mark.slow
def test_an_encoder_over_a_fixed_number_of_images():
    class Loop(Reader):
        def encode(self, pixels):
            return torch.cat([self.tower(image[None]) for image in pixels])

    model = Loop()
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    for batch in (rows_of([[1, "a", 2], [1, "a", 3]]), rows_of([[1, "a", 2], [1, "b", 3, "a"]])):
        assert_same(*(run(lambda f=f, batch=batch: f(*batch), model) for f in (compiled, model)))


class OverTheBatch(Reader):
    def encode(self, pixels):
        return self.tower(pixels - pixels.mean(0))


def test_images_that_depend_on_each_other_are_refused():
    model = OverTheBatch()
    compiled = torch.compile(model, backend="dta")
    compiled(*rows_of([[1, "a", 2, "a"], [1, "a", 3, "a"]]))  # equal images do not show it, and have its features
    with pytest.raises(RefusalError, match="depend on the other images"):
        compiled(*rows_of([[1, "a", 2, "b"], [1, "a", 3, "b"]]))


class Normed(Reader):
    def __init__(self):
        super().__init__()
        self.of_pixels = nn.BatchNorm2d(1).double()

    def encode(self, pixels):
        return self.tower(self.of_pixels(pixels))


def test_batch_norm_in_training_mode_is_refused_also_for_equal_images():
    """Their statistics are those of one image, but what is written to the running ones is not."""
    batch = rows_of([[1, "a", 2, 4, 5], [1, "a", 3]])
    with pytest.raises(RefusalError, match="batch norm in training mode"):
        torch.compile(Normed(), backend="dta")(*batch)
    model = Normed()
    model.of_pixels.eval()
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    assert_same(*(run(lambda f=f: f(*batch), model) for f in (compiled, model)))


class Padded(Reader):
    """Images `[B, n, 1, 4, 4]`, of which some are real."""

    def encode(self, pixels):
        return self.tower(pixels.flatten(0, 1)).unflatten(0, self.real.shape)[self.real]

    def forward(self, ids, pixels, real):
        self.real = real
        return super().forward(ids, pixels)


def padded_rows_of(layout):
    ids, pixels = rows_of(layout)
    numbers = (ids == IMAGE).sum(1) // PATCHES
    real = torch.arange(3) < numbers[:, None]
    return ids, pixels.new_zeros(*real.shape, 1, SIZE, SIZE).masked_scatter(real[..., None, None, None], pixels), real


def test_rows_with_other_numbers_of_images():
    """As many features as before do not belong to the same rows."""
    model = Padded()
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    equal = [[1, "a", "b", 2], [1, "a", "b", 3], [1, "c", "a", 2], [1, "c", "a", 4]]
    others = [[1, "b", 2], [1, "b", 3], [1, "a", "c", "b", 2], [1, "a", "c", "b", 4]]
    for batch in map(padded_rows_of, (equal, others)):
        assert_same(*(run(lambda f=f, batch=batch: f(*batch), model) for f in (compiled, model)))


def test_channels_of_images_in_a_list_are_no_media():
    class Listed(Reader):
        def encode(self, images):
            return torch.cat([self.tower(image.diff(dim=0).pow(2).sum(0)[None, None]) for image in images])

    model, (ids, pixels) = Listed(), rows_of([[1, "a", 2, "b"], [1, "b", 3]])
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    images = [torch.cat([pixel * factor for factor in (1, 2, 4)]) for pixel in pixels]
    assert_same(*(run(lambda f=f: f(ids, images), model) for f in (compiled, model)))


def test_masks_over_entries_are_refused():
    class Entries(Reader):
        def forward(self, ids, pixels):
            x = self.embedding(ids)
            mask = (ids == IMAGE)[..., None] & (torch.arange(x.shape[-1]) >= 0)
            return self.head(self.mix(x.masked_scatter(mask, self.encode(pixels))))

    with pytest.raises(RefusalError, match="not proven that these are whole tokens"):
        torch.compile(Entries(), backend="dta")(*rows_of([[1, "a", 2], [1, "a", 3]]))


def test_features_with_gradients_of_their_own_are_not_merged():
    """Equal features that the caller made are different tensors: each gets its own gradient."""

    class Given(Reader):
        def encode(self, features):
            return features

    model, tower = Given(), Reader().tower
    compiled = torch.compile(model, backend="dta")
    ids, pixels = rows_of([[1, "a", 2, "a", 3], [1, "a", 2, "b", 4]])

    def of(function):
        features = tower(pixels)
        features.retain_grad()
        return run(lambda: function(ids, features), model), features.grad

    assert_same(of(compiled), of(model))


class TwoTowers(Reader):
    """Images at one placeholder, sounds at another, of which there are other numbers."""

    def __init__(self):
        super().__init__()
        self.sounds = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh()).double()

    def forward(self, ids, pixels, sounds):
        x = self.embedding(ids)
        x = x.masked_scatter((ids == IMAGE)[..., None].expand_as(x), self.tower(pixels))
        return self.head(self.mix(x.masked_scatter((ids == 7)[..., None].expand_as(x), self.sounds(sounds))))


def test_encoders_of_several_kinds_of_media():
    model = TwoTowers()
    compiled = torch.compile(model, backend="dta")
    ids, pixels = rows_of([[1, "a", 7, 3], [1, "a", 7, 4], [1, "a", 7, 7]])
    sounds = torch.tensor([[0.0, 1, 2], [0, 1, 2], [0, 1, 2], [3, 4, 5]], dtype=torch.float64)
    assert_same(*(run(lambda f=f: f(ids, pixels, sounds), model) for f in (compiled, model)))
    assert tokens_run(compiled) == 4 + 1 + 1 + 1
    notes = str(dta_compile.last_plan(compiled))
    assert "3 images (or other media), 1 different" in notes and "4 images (or other media), 2 different" in notes


def test_complex_media_and_a_scale_of_all_of_them():
    class Spectra(Reader):
        def forward(self, ids, spectra, scale):
            return super().forward(ids, scale * torch.view_as_real(spectra).sum(-1))

    model, (ids, pixels) = Spectra(), rows_of([[1, "a", 2], [1, "a", 3], [1, "c", 4]])
    compiled, spectra = torch.compile(model, backend="dta"), torch.complex(pixels, pixels.flip(-1))
    for scale in torch.tensor([1, 0.25], dtype=torch.float64):
        assert_same(*(run(lambda f=f: f(ids, spectra, scale), model) for f in (compiled, model)))  # noqa: B023
    assert tokens_run(compiled) == 8


def test_media_of_equal_hash_are_compared(monkeypatch):
    monkeypatch.setattr(encoders, "_hashes", lambda words: [0] * len(words))
    pixels = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0]])
    assert encoders.distinct([pixels]) == ([0, 1, 2], [0, 1, 2])
    monkeypatch.undo()
    assert encoders.distinct([pixels]) == ([0, 2], [0, 0, 1])


@dataclasses.dataclass
class Heard(ModelOutput):
    pooler_output: torch.Tensor | None = None
    padding: torch.Tensor | None = None


class Ears(PreTrainedModel):
    """Features `[N, T, D]` of sounds `[N, T, 3]`, and a mask of those that are none."""

    def __init__(self):
        super().__init__(PretrainedConfig())
        self.layer = nn.Linear(3, WIDTH).double()

    def get_audio_features(self, sounds, lengths):
        return Heard(self.layer(sounds), torch.arange(sounds.shape[1]) >= lengths[:, None])


class Filled(Reader):
    """Fills features of sounds up by a learned vector, as Gemma 3n does, and has an encoder of images in the graph."""

    def __init__(self, between=lambda features: features):
        super().__init__()
        self.ears, self.project, self.between = Ears(), nn.Linear(WIDTH, WIDTH).double(), between
        self.fill = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64))

    def forward(self, ids, pixels, sounds, lengths):
        x, heard = self.embedding(ids), self.ears.get_audio_features(sounds, lengths)
        features = self.between(F.silu(self.project(heard.pooler_output)))
        features = torch.where(heard.padding[..., None], self.fill, features)
        features = torch.cat([features, self.fill.expand(len(features), 1, -1)], 1)
        x = x.masked_scatter((ids == 7)[..., None], features)
        return self.head(self.mix(x.masked_scatter((ids == IMAGE)[..., None], self.tower(pixels))))


def sounds_and_images():
    ids, pixels = rows_of([[1, "a", 7, 7, 7, 3], [1, "a", 7, 7, 7, 4], [1, "b", 7, 7, 7, 3], [1, "a", 7, 7, 7, 3]])
    sounds = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)[[0, 0, 0, 1]]
    return ids, pixels, sounds, torch.tensor([2, 2, 2, 1])


def test_features_are_filled_up_before_they_are_put_at_tokens():
    model, batch = Filled(), sounds_and_images()
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    assert_same(*(run(lambda f=f: f(*batch), model) for f in (compiled, model)))
    notes = str(dta_compile.last_plan(compiled))
    assert (
        "4 images (or other media), 2 different and encoded" in notes and "4 images (or other media), 2 diff" in notes
    )
    assert tokens_run(compiled) == 7 + 1 + 6 + 4


def test_features_that_depend_on_their_number_are_refused():
    for between in (lambda x: x * len(x), lambda x: x + torch.arange(len(x))[:, None, None], lambda x: x - x.mean(0)):
        torch.compiler.reset()
        with pytest.raises(RefusalError, match="not known to read each one at its token"):
            torch.compile(Filled(between), backend="dta")(*sounds_and_images())

"""Vision-language models with images, against the eager model on one row at a time."""

import re

import peft
import pytest
import torch
import transformers
from torch import nn

import dta_compile
from dta_compile.errors import RuntimeContractError
from tests.support import sounds
from tests.support.helpers import FLOAT32_ISLANDS, Batch, assert_equal, measure, random_loss, reference
from tests.support.vision import FAMILIES, GRIDS, IMAGE, V, build, inputs

# Images that are equal, that differ, several in a row, none in a row.
ROWS = [[5, 6, "a", 7, 8], [5, 6, "a", 7, 9, 3], [5, 6, "b", 7, "a", 9], [5, 6, "b", 7, "c", 9], [5, 6, 4, 4]]
OTHER_ROWS = [[8, "c", 7], [8, "c", 7, 2, "a"], [8, "c", 3]]
VIDEO = 91  # id of placeholders
QUICK = ("qwen3_vl", "idefics3", "gemma3")  # the last: tokens of an image attend to each other both ways
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def check(name, compiled, model, rows, more=lambda call: {}, tolerance=FLOAT32_ISLANDS, inputs=inputs):
    """Compare a step over all rows with eager steps over each; return the notes of its plan."""
    call = inputs(name, rows)
    number = torch.arange(len(rows))[:, None].expand(call["input_ids"].shape)
    batch = Batch(call["input_ids"], call["attention_mask"], {"row": number})

    def forward(run, part):
        of_part = inputs(name, [rows[i] for i in part.extras["row"][:, 0].tolist()])
        return run(**of_part | more(of_part), use_cache=False).logits

    loss = random_loss(batch, V)
    assert_equal(measure(compiled, model, batch, loss, forward), reference(model, batch, loss, forward), tolerance)
    plan = dta_compile.last_plan(compiled)
    return plan, " ".join(plan.estimates.notes)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("idefics3", "gemma3") else name for name in NAMES],
)
def test_images_are_encoded_once_and_shared(name):
    model = build(name)
    options = {"chunk_size": 5, "codegen": "eager", "memory_budget": 0}
    compiled = torch.compile(model, backend="dta", options=options)
    plan, notes = check(name, compiled, model, ROWS)
    assert "6 images (or other media), 3 different and encoded in 3 groups, and again in the backward" in notes
    assert plan.stats.compression > (1.1 if name == "paligemma" else 1.3)  # shares its prefix as a whole or not at all
    assert "4 images (or other media), 2 different" in check(name, compiled, model, OTHER_ROWS)[1]


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["trained", "frozen", "adapted"])
@pytest.mark.parametrize("name", FAMILIES)
def test_arrangements_of_images(name, tower):
    """Images equal in all rows, in some, in none, several a row; `adapted`: LoRA on the encoder and the text model."""
    model = build(name)
    of_tower = [part for part in model.named_modules() if re.search("vision|visual", part[0])]
    if tower == "frozen":
        for _, part in of_tower:
            part.requires_grad_(False)
    if tower == "adapted":
        layers = [
            part for part, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in part
        ]
        config = peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
        model = peft.get_peft_model(model, config).to(torch.float64)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 5, "codegen": "eager"})
    for rows, images, different in (
        ([[5, 6, 7, 8], [5, 6, 7, 9, 3], [5, 6, 2]], 0, 0),
        ([[5, "a", 7, 8], [5, "a", 7, 9, 3], [5, "a", 2]], 3, 1),
        ([[5, 6, 7, 8], [5, 6, "a", 9, 3], [5, 6, "b", 2], [5, 6]], 2, 2),
        ([[5, "a", 7, "b", 8, "c"], [5, "a", 7, "b", 8, "d"], ["a", 3, "a", 4, "b", 2]], 9, 4),
        ([[5, 6, 7, 8, 4, 4, 4], [5, 6, 7, 9, 3], [5, 6, 2]], 0, 0),
        (ROWS, 6, 3),
    ):
        # Features of Gemma 4 are in float32, and so is the sum of their gradients over all tokens.
        tolerance = FLOAT32_ISLANDS * (2 if name == "gemma4" else 1)
        _, notes = check(name, compiled, model, rows, tolerance=tolerance)
        assert (f"{images} images (or other media), {different} different" in notes) == (images > 0)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "dta"])
def test_images_whose_tokens_attend_to_each_other(attention):
    model = build("gemma3", attention=attention)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 3, "codegen": "eager"})
    for rows, most in (
        ([[5, "a", 7], [5, "a", 8]], 4),
        ([["a", 9, "b", "a"], ["a", 9, "b", "b", 3]], 8),  # images without text between them are one block
        ([[5, 6, 7], [5, 6, 8, 9]], 3),
    ):
        plan, _ = check("gemma3", compiled, model, rows)
        assert plan.stats.compression > 1.1 and plan.schedule.chunk_size == most


GIVEN = ("llava", "qwen3_vl", "gemma3", "idefics3", "mistral3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "llava" else pytest.param(name, marks=pytest.mark.slow) for name in GIVEN]
)
def test_pixels_next_to_given_embeddings(name):
    """Placeholders are found by comparing embeddings, whose gradients each row has of its own."""
    model = build(name)
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})

    def embedded(call):
        return {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(call["input_ids"])}

    plan, notes = check(name, compiled, model, ROWS, embedded)
    assert "6 images (or other media), 3 different and encoded" in notes
    assert plan.stats.compression == 1


@pytest.mark.slow
def test_an_encoder_that_is_trained_alone_and_checkpointed():
    model = build("llava")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers, runs = model.model.vision_tower.encoder.layers, []
    layers[0].self_attn.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.0.mlp" in name and "vision_tower" in name)
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    assert "3 different" in check("llava", compiled, model, ROWS)[1]
    model.requires_grad_(False)
    runs.clear()
    layers[0].requires_grad_()
    compiled(**inputs("llava", ROWS[:1] * 2), use_cache=False).logits.sum().backward()
    assert runs.count(True) == 2  # forward, and again in the backward


class Scaled(transformers.LlavaModel):
    """Features that are scaled by a parameter of the model, and one that it does not know of."""

    def get_image_features(self, *args, **kwargs):
        output = super().get_image_features(*args, **kwargs)
        output.pooler_output = [features * self.scale * self.hidden[0] for features in output.pooler_output]
        return output


@pytest.mark.slow
def test_gradients_of_what_makes_features_besides_the_encoder():
    """Of a parameter of the model itself, of one that is not registered, and of pixels; the encoder is frozen."""
    model, call = build("llava"), inputs("llava", ROWS[:2])
    model.requires_grad_(False)
    model.model.language_model.layers[0].requires_grad_()
    model.model.__class__ = Scaled
    scale, hidden, pixels = (
        values.clone().requires_grad_() for values in (*torch.rand(2, 32, dtype=torch.float64), call["pixel_values"])
    )
    model.model.scale, model.model.hidden = nn.Parameter(scale), (hidden,)

    def gradient(run, value):
        logits = run(**call | {"pixel_values": pixels}, use_cache=False).logits[call["attention_mask"].bool()]
        (logits * torch.arange(V)).sum().backward()
        gradient, value.grad = value.grad, None
        return gradient

    trained = (model.model.scale, hidden, pixels)
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    for value in trained:
        for other in trained:
            other.requires_grad_(other is value)
        if value is hidden:  # no guard is on it
            with pytest.raises(RuntimeContractError, match="features of images require a gradient"):
                compiled(**call, use_cache=False)
            torch.compiler.reset()
        torch.testing.assert_close(
            gradient(compiled, value), gradient(model, value), rtol=FLOAT32_ISLANDS, atol=FLOAT32_ISLANDS
        )
        for other in trained:
            other.requires_grad_(False)
        compiled(**call, use_cache=False)


@pytest.mark.slow
def test_positions_are_passed():
    model = build("qwen2_vl")
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})

    def positions(call):
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        axes, _ = model.model.get_rope_index(**{name: call.get(name) for name in names})
        in_text = (call["attention_mask"].cumsum(-1) - 1).clamp(min=0)[None]
        return {"position_ids": torch.cat([in_text, axes + 1])}

    # As many rows as axes of positions.
    assert "3 different" in check("qwen2_vl", compiled, model, ROWS[:4], positions)[1]


@pytest.mark.slow
def test_packed_rows_share_where_their_positions_are_equal():
    """Positions `[4, 1, T]`: in the text, which say where sequences begin, and in three axes."""
    model = build("qwen2_vl")
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    packed, expected = {}, []
    for row in ROWS[:4]:
        call = inputs("qwen2_vl", [row])
        mask, types = call.pop("attention_mask"), call.pop("mm_token_type_ids")
        axes, _ = model.model.get_rope_index(
            call["input_ids"], mm_token_type_ids=types, image_grid_thw=call["image_grid_thw"], attention_mask=mask
        )
        call["position_ids"] = torch.cat([torch.arange(mask.shape[1])[None, None], axes])
        expected.append(model(**call, use_cache=False).logits)
        for name, value in call.items():
            packed.setdefault(name, []).append(value)
    of_tokens = {"input_ids": 1, "position_ids": 2}
    packed = {name: torch.cat(values, of_tokens.get(name, 0)) for name, values in packed.items()}
    logits = compiled(**packed, use_cache=False).logits
    assert (logits - torch.cat(expected, 1)).abs().max() < FLOAT32_ISLANDS * torch.cat(expected, 1).abs().max()
    plan = dta_compile.last_plan(compiled)
    assert plan.stats.sequences == 4 and plan.stats.compression > 1.3
    assert "3 different" in str(plan)


def with_videos(call):
    """Make a video of one frame of every image "b"."""
    if "pixel_values" not in call:
        return {}
    ids, pixels, grids = (call[name].clone() for name in ("input_ids", "pixel_values", "image_grid_thw"))
    is_video = (grids == torch.tensor(GRIDS[1])).all(-1)
    ids[ids == IMAGE] = torch.where(is_video.repeat_interleave(grids.prod(-1) // 4), VIDEO, IMAGE)
    types = call["mm_token_type_ids"] + (ids == VIDEO).int()
    made = {"input_ids": ids, "mm_token_type_ids": types}
    for kind, name, chosen in (("image", "pixel_values", ~is_video), ("video", "pixel_values_videos", is_video)):
        made[name] = pixels[chosen.repeat_interleave(grids.prod(-1))] if chosen.any() else None
        made[f"{kind}_grid_thw"] = grids[chosen] if chosen.any() else None
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_images_and_videos_in_one_call(name):
    """Qwen3-VL joins the features of both for each of its levels."""
    model = build(name)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 5, "codegen": "eager"})
    plan, notes = check(name, compiled, model, ROWS, with_videos)
    assert plan.stats.compression > 1.3
    assert "4 images (or other media), 2 different" in notes and "2 images (or other media), 1 different" in notes


def test_counts_of_placeholders_and_features_are_checked():
    model = build("llava")
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager"})
    call = inputs("llava", ROWS)
    compiled(**call, use_cache=False)
    for pixels in (call["pixel_values"][:-1], call["pixel_values"].repeat(2, 1, 1, 1)):
        with pytest.raises(RuntimeContractError, match="as many placeholder tokens"):
            compiled(**{**call, "pixel_values": pixels}, use_cache=False)


SOUNDS = [[5, "a", 7, 8], [5, "a", 7, 9], [5, "b", 7, "c", 2], [5, 6, 4]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "phi4_multimodal",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3n", "gemma4", "qwen2_5_omni")),
    ],
)
def test_equal_sounds_are_encoded_once(name):
    """Of several lengths, by a mask; Phi-4's module puts the features of all sounds at their tokens itself.

    The mask of Gemma 3n is of padding, in place of which there is a learned vector.
    """
    model = sounds.build(name)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 5, "codegen": "eager"})
    # The encoders of Gemma 3n and 4 are in float32.
    tolerance = FLOAT32_ISLANDS * (10 if "gemma" in name else 1)
    plan, notes = check(name, compiled, model, SOUNDS, tolerance=tolerance, inputs=sounds.inputs)
    assert "4 images (or other media), 3 different and encoded" in notes
    assert plan.stats.compression > 1.3
    check(name, compiled, model, [[5, 6, 4], [5, 6, 3]], tolerance=tolerance, inputs=sounds.inputs)
    assert "media" not in str(dta_compile.last_plan(compiled))

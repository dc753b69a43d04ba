"""Toy vision-language models of transformers' families, and rows of text and images for them.

model = build("qwen3_vl")
call = inputs("qwen3_vl", [[5, 6, "a", 7], [5, 6, "b", "a"]])      # letters are images, numbers are text
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

V = 96
IMAGE = 90  # id of placeholders
TEXT = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "num_channels": 3,
}
PACKED_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "in_channels": 3,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
GLM_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "image_start_token_id": 92,
    "image_end_token_id": 93,
    "video_start_token_id": 94,
    "video_end_token_id": 95,
}


def _axes(*section: int) -> dict[str, object]:
    return {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": section, "rope_theta": 1e4}}


# name: configuration class, its arguments, height and width of images; None: patches of all images in one tensor
FAMILIES = {
    "qwen2_vl": (
        transformers.Qwen2VLConfig,
        {
            **TOKENS,
            "text_config": _axes(2, 1, 1),
            "vision_config": {**PACKED_TOWER, "embed_dim": 32, "mlp_ratio": 2},
        },
        None,
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        {
            **TOKENS,
            "text_config": _axes(2, 1, 1),
            "vision_config": {**PACKED_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        None,
    ),
    "qwen3_vl": (
        transformers.Qwen3VLConfig,
        {
            **TOKENS,
            "text_config": {**_axes(2, 1, 1), "head_dim": 8, "num_hidden_layers": 2},
            "vision_config": {
                **PACKED_TOWER,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        None,
    ),
    "glm46v": (
        transformers.Glm46VConfig,
        {
            **GLM_TOKENS,
            "text_config": {**_axes(1, 1, 2), "head_dim": 8, "model_type": "glm4v_text"},
            "vision_config": {**PACKED_TOWER, "image_size": 16, "model_type": "glm4v_vision"},
        },
        None,
    ),
    "internvl": (
        transformers.InternVLConfig,
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "image_size": [8, 8], "patch_size": [4, 4]},
            "image_token_id": IMAGE,
            "image_seq_length": 1,
        },
        8,
    ),
    "llava": (
        transformers.LlavaConfig,
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "image_size": 8, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        8,
    ),
    "gemma3": (
        transformers.Gemma3Config,
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "head_dim": 8,
                "sliding_window": 3,
            },
            "vision_config": {**TOWER, "image_size": 16},
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 4,
        },
        16,
    ),
    "gemma4": (
        transformers.Gemma4Config,
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "head_dim": 8,
                "global_head_dim": 8,
                "sliding_window": 3,
                "use_bidirectional_attention": "vision",
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
            },
            "vision_config": {
                **TOWER,
                "head_dim": 8,
                "num_key_value_heads": 4,
                "default_output_length": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
        },
        16,
    ),
    "paligemma": (
        transformers.PaliGemmaConfig,
        {
            "text_config": {**TEXT, "head_dim": 8, "model_type": "gemma"},
            "vision_config": {**TOWER, "image_size": 8, "model_type": "siglip_vision_model", "projection_dim": 32},
            "image_token_index": IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
        },
        8,
    ),
    "idefics3": (
        transformers.Idefics3Config,
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "image_size": 16},
            "image_token_id": IMAGE,
        },
        16,
    ),
    "smolvlm": (
        transformers.SmolVLMConfig,
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "image_size": 16},
            "image_token_id": IMAGE,
        },
        16,
    ),
    "aya": (
        transformers.AyaVisionConfig,
        {
            "text_config": {**TEXT, "head_dim": 8, "sliding_window": 64, "model_type": "cohere2"},
            "vision_config": {**TOWER, "image_size": 8, "model_type": "siglip_vision_model"},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "alignment_intermediate_size": 32,
        },
        8,
    ),
    "mistral3": (
        transformers.Mistral3Config,
        {
            "text_config": {**TEXT, "head_dim": 8, "sliding_window": None, "model_type": "mistral"},
            "vision_config": {**TOWER, "image_size": 16, "model_type": "pixtral"},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        16,
    ),
}
PACKED = [name for name, (_, _, side) in FAMILIES.items() if side is None]
GRIDS = ((1, 2, 4), (1, 4, 4), (1, 2, 2), (1, 4, 2))  # of packed images: time, height and width in patches
TOKENS_OF_IMAGE = {"internvl": 1, "aya": 1}  # of the other families: 4


def build(name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> transformers.PreTrainedModel:
    """Build a model with large weights, so that images matter, and with no dropout, in training mode."""
    torch.manual_seed(1)
    config = FAMILIES[name][0](**FAMILIES[name][1])
    attentions = {"text_config": attention, "vision_config": "sdpa"}
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=attentions).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.15)
    return model.train()


def inputs(name: str, rows: Sequence[Sequence[int | str]]) -> dict[str, torch.Tensor]:
    """Build the arguments of a model for rows of text (ids) and images ("a" to "d"), padded on the right."""
    images = [["abcd".index(part) for part in row if isinstance(part, str)] for row in rows]
    lengths = [torch.tensor(grid).prod().item() // 4 for grid in GRIDS]
    if name not in PACKED:
        lengths = [TOKENS_OF_IMAGE.get(name, 4)] * 4
    ids = [[i for part in row for i in _ids(part, lengths)] for row in rows]
    longest = max(map(len, ids))
    call = {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
    }
    is_image = (call["input_ids"] == IMAGE).int()
    if name in PACKED or name == "gemma4":
        call["mm_token_type_ids"] = is_image
    if name == "gemma3":
        call["token_type_ids"] = is_image
    if name == "paligemma":  # zero in the prefix, whose tokens attend to each other: all up to the last image
        call["token_type_ids"] = (is_image.flip(1).cumsum(1).flip(1) == 0).int()
    return call | (_pixels(name, images) if any(images) else {})


def _ids(part: int | str, lengths: Sequence[int]) -> list[int]:
    return [part] if isinstance(part, int) else [IMAGE] * lengths["abcd".index(part)]


def _pixels(name: str, images: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    flat = [image for row in images for image in row]
    if name in PACKED:
        pixels = [torch.randn(t * h * w, 96, generator=drawn, dtype=torch.float64) for t, h, w in GRIDS]
        grids = torch.tensor([GRIDS[image] for image in flat])
        return {"pixel_values": torch.cat([pixels[image] for image in flat]), "image_grid_thw": grids}
    side = FAMILIES[name][2]
    drawn_images = torch.randn(4, 3, side, side, generator=drawn, dtype=torch.float64)
    if name in ("idefics3", "smolvlm"):
        pixels = drawn_images.new_zeros(len(images), max(map(len, images)), 3, side, side)
        for row, of_row in zip(pixels, images, strict=True):
            row[: len(of_row)] = drawn_images[of_row]
        return {"pixel_values": pixels}
    call = {"pixel_values": drawn_images[flat]}
    if name == "gemma4":
        patches = drawn_images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(4, 16, 48)
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
        return {"pixel_values": patches[flat], "image_position_ids": places.expand(len(flat), -1, -1).clone()}
    if name == "mistral3":
        call["image_sizes"] = torch.tensor([[side, side]] * len(flat))
    return call

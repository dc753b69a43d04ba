"""Toy models of transformers that take sounds, and arguments for them.

model = build("gemma4")
call = inputs("gemma4", [[5, "a", 7], [5, "b", 7, "a"]])      # letters are sounds, numbers are text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

from tests.support.vision import FAMILIES, TEXT, TOWER

SOUND = 94  # id of placeholders
LENGTHS = (16, 16, 12)  # frames of the sounds "a", "b" and "c"
BINS = {"qwen2_5_omni": 8, "gemma3n": 8, "gemma4": 128, "phi4_multimodal": 8}

_OMNI = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 100,
    "n_window": 4,
    "output_dim": 32,
}
_GEMMA = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [128, 4],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 32,
    "use_clipped_linears": False,
}
_GEMMA_3N = {
    "text_config": {
        **TEXT,
        "vocab_size_per_layer_input": 80,
        "hidden_size_per_layer_input": 8,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "num_kv_shared_layers": 0,
        "head_dim": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
    },
    "audio_config": {
        "vocab_size": 12,
        "vocab_offset": 84,
        "input_feat_size": 8,
        "hidden_size": 32,
        "conf_attention_chunk_size": 4,
        "conf_attention_context_left": 5,
        "conf_num_attention_heads": 4,
        "conf_num_hidden_layers": 1,
        "conf_reduction_factor": 1,
        "sscp_conv_channel_size": (8, 4),
    },
    "vision_config": {"hidden_size": 32, "vocab_size": 4, "vocab_offset": 80},
    "image_token_id": 80,
    "audio_token_id": SOUND,
    "audio_soft_tokens_per_image": 5,
    "vision_soft_tokens_per_image": 4,
}
_PHI = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_blocks": 1,
    "num_attention_heads": 4,
    "input_size": 8,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 16,
    "time_reduction": 4,
    "dropout_rate": 0.0,
    "audio_token_id": SOUND,
}
WITHOUT_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_dropout": 0.0}
VISION = {**TOWER, "image_size": 16, "crop_size": 16, "image_token_id": 90}


def build(name: str) -> Any:
    """Build a model in float64, in training mode but for what draws random numbers in it."""
    torch.manual_seed(1)
    if name == "qwen2_5_omni":
        settings = {"audio_config": _OMNI, "audio_token_id": SOUND, "audio_start_token_id": 95}
        config = transformers.Qwen2_5OmniThinkerConfig(**FAMILIES["qwen2_5_vl"][1], **settings)
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config).double().train()
    if name == "gemma4":
        settings = {**FAMILIES["gemma4"][1], "audio_config": _GEMMA, "audio_token_id": SOUND}
        model = transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(**settings)).double().train()
        for part in (model.model.audio_tower, model.model.embed_audio):
            part.float()  # which attention computes in
        return model
    if name == "gemma3n":
        # Its encoder of images is one of timm, which is not installed.
        parts = transformers.models.gemma3n.modeling_gemma3n.AutoModel
        make = parts.from_config
        without = {"side_effect": lambda config: nn.Identity() if "vision" in config.model_type else make(config)}
        with mock.patch.object(parts, "from_config", **without):
            model = transformers.Gemma3nForConditionalGeneration(transformers.Gemma3nConfig(**_GEMMA_3N))
        for part in (model.double().train().model.audio_tower, model.model.embed_audio):
            part.float()  # in float64 there is NaN where a query may read no key
        return model
    settings = {**TEXT, **WITHOUT_DROPOUT, "original_max_position_embeddings": 128, "sliding_window": None}
    config = transformers.Phi4MultimodalConfig(**settings, vision_config=VISION, audio_config=_PHI)
    model = transformers.Phi4MultimodalForCausalLM(config).double().train()
    model.model.embed_tokens_extend.audio_embed.encoder.eval()  # which draws where chunks begin
    return model


def inputs(name: str, rows: Sequence[Sequence[int | str]]) -> dict[str, torch.Tensor]:
    """Build the arguments of a model for rows of text (ids) and sounds ("a" to "c"), padded on the right."""
    sounds = ["abc".index(part) for row in rows for part in row if isinstance(part, str)]
    ids = [
        [i for part in row for i in ([part] if isinstance(part, int) else [SOUND] * _tokens(name, part))]
        for row in rows
    ]
    longest = max(map(len, ids))
    call = {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
    }
    if name == "gemma4":
        call["mm_token_type_ids"] = torch.zeros_like(call["input_ids"])
    if not sounds:
        return call
    dtype = torch.float32 if name in ("gemma3n", "gemma4") else torch.float64
    drawn = torch.randn(3, 16, BINS[name], generator=torch.Generator().manual_seed(3)).to(dtype)[sounds]
    lengths = torch.tensor(LENGTHS)[sounds]
    mask = torch.arange(16) < lengths[:, None]
    if name in ("gemma3n", "gemma4"):
        return {**call, "input_features": drawn, "input_features_mask": mask}
    if name == "qwen2_5_omni":
        return {**call, "input_features": (drawn * mask[..., None]).mT, "feature_attention_mask": mask.long()}
    return {**call, "audio_input_features": drawn, "audio_embed_sizes": lengths // 4, "audio_attention_mask": mask}


def _tokens(name: str, sound: str) -> int:
    return 5 if name == "gemma3n" else LENGTHS["abc".index(sound)] // 4

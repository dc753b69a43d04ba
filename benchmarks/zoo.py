"""Every causal LM architecture of the installed transformers at toy size, against one sequence at a time in eager mode.

    python benchmarks/zoo.py [model types] [--write benchmarks/MODELS.md]

Prints a table: the largest relative error of the outputs and of the gradients in float64, or why the model was refused
(by `dta`) or skipped (eager mode fails at this size). Models that transformers does not run with SDPA attention run
with `attn_implementation="dta"`, against "eager". Mixtures of experts run with the experts that transformers chooses,
against its loop over experts, and once more with their load-balancing loss, against a padded batch in eager mode.
`--write` has all types in the table of a page.
"""

from __future__ import annotations

import logging
import pathlib
import sys
import time
import warnings
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dta_compile.backend import dta
from dta_compile.errors import DTAError
from tests.support.helpers import Measurement, errors, make_batch, measure, random_loss, reference, rollouts

VOCABULARY = 96
EXPERTS = 8
SIZES = {
    ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "input_embedding_size"): 64,
    ("vocab_size",): VOCABULARY,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"): 2,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): 4,
    ("num_key_value_heads", "n_head_kv", "num_kv_heads"): 2,
    ("head_dim", "v_head_dim", "kv_channels"): 16,
    ("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "n_inner", "shared_intermediate_size"): 96,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"): 32,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): EXPERTS,
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "top_k_experts"): 2,
    ("topk_group", "rotary_dim", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"): 1,
    ("n_group", "num_expert_group", "zero_expert_num"): 2,
    ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"): 1,  # a dense layer and one of experts
    ("router_hidden_size",): 16,
    ("enable_moe_block",): True,
    ("q_lora_rank", "kv_lora_rank", "pad_token_id"): 16,
    ("qk_rope_head_dim", "qk_nope_head_dim"): 8,
    ("max_position_embeddings", "n_positions", "max_seq_len"): 128,
    ("sliding_window", "attention_window"): 5,
}
WITHOUT_GROUPS = ("n_group", "topk_group")  # left alone where the model does not route within groups by default


def toy_config(model_type: str) -> Any:
    """A configuration of two layers and 64 features, without dropout."""
    cls = transformers.CONFIG_MAPPING[model_type]
    default = cls()
    if hasattr(default, "text_config"):
        raise NotImplementedError("several modalities")
    computed = {name for name in dir(cls) if isinstance(getattr(cls, name), property)}
    known = {name: size for names, size in SIZES.items() for name in names if hasattr(default, name)}
    values = {name: size for name, size in known.items() if name not in computed}
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no groups
    for name, value in vars(default).items():
        if ("drop" in name or "pdrop" in name) and isinstance(value, float):
            values[name] = 0.0
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[name] = 0 if name == "pad_token_id" else None
    for name in WITHOUT_GROUPS:
        if getattr(default, name, None) is None:
            values.pop(name, None)
    if getattr(default, "layer_types", None) is not None:
        values["layer_types"] = None  # made anew for two layers
    if "sparse" in (getattr(default, "mlp_layer_types", None) or ()):
        values["mlp_layer_types"] = ["dense", "sparse"] if "dense" in default.mlp_layer_types else ["sparse", "sparse"]
    return cls(**values)


def try_model(model_type: str) -> tuple[str, str, str]:
    """Error of the outputs, error of the gradients, remark."""
    found = _try_with(model_type, "sdpa", "sdpa")
    if not found[2].startswith(("skipped: ValueError", "skipped: KeyError", "eager fails", "refused: attention")):
        return found
    again = _try_with(model_type, "dta", "eager")
    return again if again[0] else found


def _try_with(model_type: str, implementation: str, eager: str) -> tuple[str, str, str]:
    try:
        config = toy_config(model_type)
        with torch.device("meta"):
            shape = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        if sum(parameter.numel() for parameter in shape.parameters()) > 5_000_000:
            return "", "", "skipped: its configuration has sizes that this script does not know"
        model, exact = (_build(model_type, one) for one in (implementation, eager))
    except Exception as error:
        return "", "", f"skipped: {_line(error)}"
    batch = make_batch(rollouts(VOCABULARY))
    loss = random_loss(batch, VOCABULARY)
    try:
        expected = reference(exact, batch, loss)
    except Exception as error:
        return "", "", f"eager fails: {_line(error)}"
    torch._dynamo.reset()
    try:
        start = time.perf_counter()
        compiled = torch.compile(model, backend=dta, options={"chunk_size": 4})
        actual: Measurement = measure(compiled, model, batch, loss)
        found = errors(actual, expected)
    except DTAError as error:
        return "", "", f"refused: {error.what}; {error.got}"
    except Exception as error:
        return "", "", f"FAILS: {_line(error)}"
    out, grad = found.pop("outputs"), max(found.values())
    return f"{out:.1e}", f"{grad:.1e}", f"{time.perf_counter() - start:.1f} s with {implementation}"


def _build(model_type: str, implementation: str) -> Any:
    torch.manual_seed(1)
    config = toy_config(model_type)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().train()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    for model_type in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        out, grad, remark = try_model(model_type)
        print(f"{model_type:24} {out:>9} {grad:>9}  {remark}", flush=True)


if __name__ == "__main__":
    main()

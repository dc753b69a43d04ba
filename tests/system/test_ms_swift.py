"""ms-swift's SFT with the plug-in of docs/use/other_trainers.md trains to the same weights over a prefix tree."""

import json
import pathlib
import re

import pytest
import torch

pytest.importorskip("swift.pipelines")

from safetensors.torch import load_file
from swift import SftArguments, sft_main
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "use" / "other_trainers.md"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
SETTINGS = {
    "model_type": "qwen3",
    "template": "qwen3",
    "tuner_type": "full",
    "torch_dtype": "float32",
    "add_version": False,
    "max_steps": 3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0.1,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "train_dataloader_shuffle": False,
    "dataset_shuffle": False,
    "attn_impl": "sdpa",
    "save_steps": 3,
    "report_to": [],
    "split_dataset_ratio": 0,
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
}


def save_model(folder):
    words = ["<pad>", "<unk>", "user", "assistant", "system", *SPECIAL, *(f"w{i}" for i in range(9, 64))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(
        tokenizer_object=words, **special, additional_special_tokens=SPECIAL
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    Qwen3ForCausalLM(Qwen3Config(**heads, **sizes, eos_token_id=6, pad_token_id=0)).save_pretrained(folder)


def text(draw, words):
    return " ".join(f"w{i}" for i in torch.randint(9, 64, (words,), generator=draw).tolist())


@pytest.mark.slow
def test_ms_swift_ends_at_the_weights_of_its_own_path(tmp_path):
    """Four answers to each of six questions, two questions a batch."""
    save_model(tmp_path / "model")
    draw, rows, plugin = torch.Generator().manual_seed(1), [], tmp_path / "dta_plugin.py"
    for question in [text(draw, 14) for _ in range(6)]:
        for _ in range(4):
            answer = {"role": "assistant", "content": text(draw, 6)}
            rows.append(json.dumps({"messages": [{"role": "user", "content": question}, answer]}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    plugin.write_text(re.search(r"```python\n(# dta_plugin.py\n.*?)```", PAGE.read_text(), re.DOTALL)[1])
    paths, ours = {"model": str(tmp_path / "model"), "dataset": [str(tmp_path / "rows.jsonl")]}, []
    for plugins in ({}, {"external_plugins": [str(plugin)], "callbacks": ["dta"]}):
        out = tmp_path / f"out{len(ours)}"
        sft_main(SftArguments(output_dir=str(out), **paths, **SETTINGS, **plugins))
        ours.append(load_file(out / "checkpoint-3" / "model.safetensors"))
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert max(float((value - start[name]).abs().max()) for name, value in ours[0].items()) > 1e-3
    assert max(float((value - ours[1][name]).abs().max()) for name, value in ours[0].items()) < 1e-6
    losses = [json.loads(line) for line in (out / "logging.jsonl").read_text().splitlines()]
    assert all(float(one["dta/compression"]) > 2 for one in losses if "loss" in one)

"""torchtitan's own trainer on CPUs: the same rows and model, by itself or over the prefix tree.

torchtitan knows accelerators only. What it asks of one is answered here; meshes, sharding and the loop are its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention
from torchtitan.tools import utils

nothing = dict.fromkeys(("reset_peak_memory_stats", "empty_cache", "synchronize"), lambda *_: None)
utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
    **vars(torch.cpu)
    | nothing
    | {
        "get_device_name": lambda _: "cpu",
        "get_device_properties": lambda _: types.SimpleNamespace(total_memory=2**34),
        "memory_stats": lambda _: {},
        "current_device": lambda: 0,
    }
)

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import dta_compile  # noqa: E402

TORCH_DTYPE_MAP["float64"] = torch.float64
flex_attention._validate_device = lambda *_: None  # else torch refuses gradients on CPUs while it is traced
VOCABULARY = 2048
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "use" / "torchtitan.md"


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **given: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **given: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **given: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Rows(BaseDataLoader):
    """Batches of rows with common beginnings, as long as `seq_len` with padding, which has no labels."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **given: Any) -> None:
        self.rank, self.tokens, self.rows = dp_rank, seq_len, local_batch_size

    def __iter__(self) -> Any:
        draw = torch.Generator().manual_seed(self.rank)
        while True:
            ids = torch.randint(VOCABULARY, (self.rows, self.tokens + 1), generator=draw)
            ids[:, : self.tokens // 2] = ids[0, : self.tokens // 2]
            ids[self.rows // 2 :, : 3 * self.tokens // 4] = ids[-1, : 3 * self.tokens // 4]
            labels = ids[:, 1:].clone()
            labels[0, -3:] = -100
            positions = torch.arange(self.tokens).expand(self.rows, -1)
            yield {"input": ids[:, :-1].contiguous(), "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def configure(
    family: str, folder: str, dtype: str = "float64", chunked: bool = False, flex: bool = False, **training: Any
) -> Trainer.Config:
    """Return torchtitan's settings for two layers of its debug model.

    Args:
        flex: with FlexAttention, torchtitan's default, in place of the attention of one document a row.
    """
    spec = {"llama3": llama3, "qwen3": qwen3}[family].model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = FlexAttention.Config() if flex else ScaledDotProductAttention.Config()
    loss = CrossEntropyLoss.Config()
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=ChunkedLossWrapper.Config(num_chunks=2, loss_fn=loss) if chunked else loss,
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(),
        optimizer=default_adamw(lr=1e-3, eps=1e-4),
        training=TrainingConfig(
            local_batch_size=4,
            seq_len=32,
            steps=3,
            dtype=dtype,  # type: ignore[arg-type]
            mixed_precision_param=dtype,  # type: ignore[arg-type]
            mixed_precision_reduce=dtype,  # type: ignore[arg-type]
            disable_cuda_graphs=True,
            **training,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the default needs a torch after 2.13
        checkpoint=CheckpointManager.Config(enable=False),
    )
    config.debug.seed = 0
    return config


def recipe(way: str) -> str:
    """Return the code of docs/use/torchtitan.md for the `model` alone, or for `losses`, without its start."""
    model, losses = re.findall(r"```python\n((?!# train.py).*?)```", PAGE.read_text(), re.DOTALL)
    return {"model": model, "losses": losses}[way]


def train(family: str, way: str | None = None, **settings: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights after training, gathered, and C of the last call."""
    with tempfile.TemporaryDirectory() as folder:
        made = configure(family, folder, **settings).build()
        names = {"trainer": made}
        with (
            mock.patch("torchtitan.trainer.dist_utils.set_pg_timeouts"),  # needs a torch after 2.13
            mock.patch("torchtitan.trainer.time.sleep"),
        ):
            exec("trainer.train()" if way is None else recipe(way), names)
        weights = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in made.model_parts[0].named_parameters()
        }
        compiled = names.get("losses", made.model_parts[0])
        return weights, 1.0 if way is None else dta_compile.last_plan(compiled).stats.compression


def compare(family: str, ways: Sequence[str], **settings: Any) -> list[tuple[float, float]]:
    """Return, by way, the largest difference of a weight after training, and C of the last call."""
    eager, _ = train(family, **{**settings, "flex": False})  # torch's FlexAttention has no backward on CPUs
    found = []
    for way in ways:
        ours, compression = train(family, way, **settings)
        found.append((max(float((value - ours[name]).abs().max()) for name, value in eager.items()), compression))
    return found


def launch(family: str, ranks: int, ways: Sequence[str], **settings: Any) -> list[tuple[float, float]]:
    """Run `compare` in processes of their own, as torchrun starts them, and return what rank 0 has found."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "tests.support.titan", str(out), json.dumps({"family": family, "ways": ways, **settings})]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = pathlib.Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        return [tuple(pair) for pair in json.loads(out.read_text())]


if __name__ == "__main__":
    results = compare(**json.loads(sys.argv[2]))
    if torch.distributed.get_rank() == 0:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()

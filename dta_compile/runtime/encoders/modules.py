"""Modules that encode media and put the features at placeholder tokens themselves, as those of Phi-4-multimodal do.

Such a module takes `input_ids`, `inputs_embeds` and media, and returns the embeddings with features in them. It runs on
embeddings without values, and the features that it would put there are taken.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dta_compile.errors import RuntimeContractError
from dta_compile.integrations.fully_shard import reading_gathered
from dta_compile.runtime.encoders.encoder import Encoder
from dta_compile.runtime.encoders.trial import Trial

IDS, TOKENS = "input_ids", "inputs_embeds"
PUTS = {torch.Tensor.index_put: ("indices", "values"), torch.Tensor.masked_scatter: ("mask", "source")}


class EncoderModule(Encoder):
    """The `forward` of a module that puts features at the placeholder tokens of one id.

    Of the argument `inputs_embeds` it has the width and the dtype.

    Attributes:
        token: the id, known after `learn`; None if the module does anything else.
    """

    shared = (IDS,)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.token: int | None = None

    @property
    def number_of_ids(self) -> int:
        """Which of the tensor arguments has the ids."""
        return self.names().index(IDS)

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the features `[n, D]` as the attribute `pooler_output`.

        Raises:
            RuntimeContractError: they would be put at other tokens.
        """
        ids, puts, _ = self._run(tensors, is_trial=False)
        if self.token is None or puts.places is None or not torch.equal(puts.places, ids.eq(self.token)):
            raise RuntimeContractError(
                "features of images (or other media) would be put at other tokens than in the call that was compiled",
                where=self.name,
                expected=f"all tokens with the id {self.token}",
                got="other tokens",
                hint="check the ids of placeholder tokens, or call torch.compiler.reset() after changing them",
            )
        return types.SimpleNamespace(pooler_output=puts.features)

    def learn(self, tensors: Sequence[torch.Tensor]) -> None:
        """As of an `Encoder`; find out at which tokens features are put, and whether the module does nothing else."""
        self.token = None
        with Trial(self.module) as trial:
            ids, puts, result = self._run(tensors, is_trial=True)
        if puts.places is None or not (trial.is_random or torch.equal(result, puts.expected)):
            return
        chosen = ids[puts.places].unique()
        if len(chosen) == 1 and torch.equal(puts.places, ids == chosen):
            self.token = int(chosen)
            super().learn(tensors)
            with Trial(self.module):
                features = self.run(tensors).pooler_output  # which do not depend on the other tokens
            self.token = self.token if trial.is_random or torch.equal(features, puts.features) else None

    def _batch(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        # A list of numbers is of all units.
        has_lists = any(isinstance(value, tuple) for name, value in self.arguments.keyword if name != TOKENS)
        return None if has_lists else super()._batch(tensors)

    def _run(self, tensors: Sequence[torch.Tensor], is_trial: bool) -> tuple[torch.Tensor, _Puts, Any]:
        """Return the ids, what the module puts into embeddings, and its result.

        Args:
            is_trial: embeddings have values, and it is put there.
        """
        _, keyword = self.arguments.filled(tensors)
        ids, (width, dtype) = keyword[IDS], keyword[TOKENS]
        embeddings = torch.full((), torch.nan, dtype=dtype, device=ids.device).expand(*ids.shape, width)
        if is_trial:
            embeddings = torch.arange(embeddings.numel(), device=ids.device).view(embeddings.shape).sin().to(dtype)
        with _Puts(embeddings, is_trial) as puts, reading_gathered():
            return ids, puts, self.method(self.module, **keyword | {TOKENS: embeddings})


class _Puts(TorchFunctionMode):
    """Take what is put into embeddings `[B, S, D]`.

    Attributes:
        places: the mask `[B, S]` of the tokens that it is put at, in their order; None for anything else.
        features: `[n, D]`.
        expected: the embeddings with it.
    """

    def __init__(self, embeddings: torch.Tensor, is_trial: bool) -> None:
        super().__init__()
        self.embeddings, self.is_trial = embeddings, is_trial
        self.places: torch.Tensor | None = None
        self.features = self.expected = embeddings
        self.puts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PUTS or args[0] is not self.embeddings:
            return func(*args, **kwargs)
        given = dict(zip(PUTS[func], args[1:], strict=False)) | kwargs
        index, features = (given[name] for name in PUTS[func])
        self.puts += 1
        self.places = None if self.puts > 1 or given.get("accumulate") else self._places(index)
        self.features = features.reshape(-1, features.shape[-1])
        self.expected = func(*args, **kwargs) if self.is_trial else self.embeddings
        return self.expected

    def _places(self, index: Any) -> torch.Tensor | None:
        shape = self.embeddings.shape[:2]
        if isinstance(index, torch.Tensor):  # a mask of entries
            entries = index.expand(self.embeddings.shape)
            return entries[..., 0] if torch.equal(entries.all(-1), entries.any(-1)) else None
        places = torch.zeros(shape, dtype=torch.bool, device=self.embeddings.device)
        if len(index) == 1:
            return index[0] if index[0].dtype is torch.bool and index[0].shape == shape else None
        places[tuple(index)] = True
        return places if len(index) == 2 and torch.equal(torch.stack(list(index), 1), places.nonzero()) else None

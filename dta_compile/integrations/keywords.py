"""Check keyword arguments that models pass to our functions: ignore those without influence, refuse all others.

Models of transformers pass on whatever they were called with, and arguments that only some implementations read
(`block_indices` of learned sparse attention). A function that ignored a meaningful argument would compute something
else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from dta_compile.ops.library import REFUSED

WITHOUT_MEANING = {  # no influence on the result, and why
    "cu_seq_lens_k": "attention over itself: the sequences of keys are those of queries, cu_seq_lens_q",
    "deterministic": "how kernels add up",
    "labels": "of the loss",
    "logits_to_keep": "of the head",
    "max_length_k": "a size that kernels ask for, known from cu_seq_lens_q",
    "max_length_q": "a size that kernels ask for, known from cu_seq_lens_q",
    "mm_token_type_ids": "of the model, which makes masks of them",
    "num_items_in_batch": "of the loss",
    "output_attentions": "what the model returns; weights are None, as with sdpa",
    "output_hidden_states": "what the model returns",
    "output_router_logits": "what the model returns",
    "return_dict": "what the model returns",
    "seq_idx": "of recurrences and convolutions",
    "shift_labels": "of the loss",
    "token_type_ids": "of the model, which makes masks of them",
    "use_cache": "of the model, which hands over the keys of its cache",
}
EAGER = 'attn_implementation="eager" reads whatever the model hands over'
HINTS = {
    "block_indices": "the model chooses blocks of keys: train it without the backend, or with"
    " options={'fallback': 'dense'}",
    "indices": 'the model chooses keys, which attn_implementation="dta" or "sdpa" does with a mask',
}


def refuse_unknown(
    value: torch.Tensor, function: str, given: Mapping[str, Any], known: Collection[str] = (), hint: str = EAGER
) -> torch.Tensor:
    """Return `value`, on which the result of a function depends, or refuse arguments that the function would ignore.

    Args:
        function: its name in the error.
        given: keyword arguments of the call; None counts as left out.
        known: names that the function reads.
        hint: hint of the error for arguments that are not in `HINTS`.

    Raises:
        RefusalError: an argument is neither known nor without influence. While Dynamo traces, the graph raises it.
    """
    unknown = [name for name in given if given[name] is not None and name not in known and name not in WITHOUT_MEANING]
    if not unknown:
        return value
    names = ", ".join(unknown)
    hints = [HINTS.get(name, hint) for name in unknown]
    refused: torch.Tensor = REFUSED(
        value,
        f"{function} is handed arguments that it does not know, and whose meaning would be lost: {names}",
        "arguments that are known, or None",
        names,
        hints[0],
    )
    return refused

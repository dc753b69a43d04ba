"""Prefix sharing for training: the `torch.compile` backend "dta" runs causal LMs over the prefix tree of a batch.

The names in `__all__` are the public interface. Importing the package is cheap: torch is imported when a name
needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dta_compile import errors, registration
from dta_compile.plan import Plan, Schedule, balance, plan
from dta_compile.rollouts import RolloutTree
from dta_compile.views.page_data import picture

if TYPE_CHECKING:
    from dta_compile.api import explain, last_plan, streaming_step
    from dta_compile.callback import DTACallback
    from dta_compile.ops.causal_attention import attention
    from dta_compile.ops.experts.operators import expert_linear, expert_sum
    from dta_compile.ops.recurrences.functions import (
        gated_delta_rule,
        linear_attention,
        linear_recurrence,
        selective_scan,
        short_convolution,
    )
    from dta_compile.passes import register_token_rule

__version__ = "0.1.0"

registration.register()
Plan.picture = picture

__all__ = [
    "DTACallback",
    "Plan",
    "RolloutTree",
    "Schedule",
    "attention",
    "balance",
    "errors",
    "expert_linear",
    "expert_sum",
    "explain",
    "gated_delta_rule",
    "last_plan",
    "linear_attention",
    "linear_recurrence",
    "plan",
    "register_token_rule",
    "selective_scan",
    "short_convolution",
    "streaming_step",
]

_LAZY = {
    "DTACallback": "dta_compile.callback",
    "attention": "dta_compile.ops.causal_attention",
    "expert_linear": "dta_compile.ops.experts.operators",
    "expert_sum": "dta_compile.ops.experts.operators",
    "explain": "dta_compile.api",
    "gated_delta_rule": "dta_compile.ops.recurrences.functions",
    "linear_attention": "dta_compile.ops.recurrences.functions",
    "linear_recurrence": "dta_compile.ops.recurrences.functions",
    "selective_scan": "dta_compile.ops.recurrences.functions",
    "short_convolution": "dta_compile.ops.recurrences.functions",
    "last_plan": "dta_compile.api",
    "streaming_step": "dta_compile.api",
    "register_token_rule": "dta_compile.passes",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

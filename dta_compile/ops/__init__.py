"""Custom operators of the library `dta`. Importing this package registers all of them."""

from dta_compile.ops import (
    attention,
    autograd_function,
    collectives,
    experts,
    feature_tables,
    library,
    lm_head,
    mixer,
    products,
)

__all__ = [
    "attention",
    "autograd_function",
    "collectives",
    "experts",
    "feature_tables",
    "library",
    "lm_head",
    "mixer",
    "products",
]

"""Log-probs and entropies of a language-model head without materialised logits: the operators and their kernels."""

from dta_compile.ops.lm_head import blocks, operators

__all__ = ["blocks", "operators"]

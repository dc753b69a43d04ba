"""Log-probs and entropies of a language-model head, without its logits: the operators, and what computes them."""

from dta_compile.ops.lm_head import blocks, operators

__all__ = ["blocks", "operators"]

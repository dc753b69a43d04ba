"""Names for writing a rule for `dta_compile.register_token_rule`.

A rule is called as `rule(node, arguments)` for every call of its operator; `arguments[node.args[i]]` is the `Layout` of
the i-th argument. It returns the `Layout` of the result, a tuple of them for several results, or raises `MixesTokens`.
`pointwise` is the rule of element-wise operators.
"""

from dta_compile.executable.layouts import Axis, Flat, Frame, Layout
from dta_compile.passes.axes.layouts import Arguments, MixesTokens, Rule
from dta_compile.passes.axes.tokenwise_operators import pointwise

__all__ = ["Arguments", "Axis", "Flat", "Frame", "Layout", "MixesTokens", "Rule", "pointwise"]

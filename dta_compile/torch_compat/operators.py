"""Operators: their types, what was registered for them, and functions that captured graphs name."""

from dta_compile.torch_compat import needed_for

with needed_for("reading operators of a graph"):
    from torch._C import _dispatch_dump as registrations_of
    from torch._C import _nn as functions_of_nn
    from torch._library.custom_ops import OPDEFS
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

with needed_for("noticing operators that other code registers"):
    from torch.library import _defs as definitions
    from torch.library import _impls as implementations

with needed_for("the matrix products that torch is built with"):
    from torch._C import __file__ as LIBRARY

with needed_for("checks of values on a device"):
    from torch import _assert_async as assert_async

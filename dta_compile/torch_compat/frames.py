"""What torch tells nobody: which compiled callable is running, and what Dynamo is tracing, from Python's own frames."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from dta_compile.torch_compat import needed_for
from dta_compile.torch_compat.dynamo import InstructionTranslator, OutputGraph

with needed_for("finding the compiled callable of a graph"):
    from torch import _TorchCompileWrapper as CompileWrapper
    from torch._dynamo import eval_frame
    from torch._dynamo.eval_frame import DisableContext, _TorchDynamoContext as Context

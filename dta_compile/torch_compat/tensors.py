"""Tensors without values, tensors that stand for others, and modes of the dispatcher."""

import contextlib
from collections.abc import Iterator

import torch

from dta_compile.torch_compat import needed_for

with needed_for("tensors without values"):
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, mb_unwrap_functional_tensor

with needed_for("tensors that stand for a result"):
    from torch._C import DisableTorchFunction
    from torch._C import _disabled_torch_function_impl as no_torch_function
    from torch._prims_common import clone_preserve_strides

with needed_for("code that runs below the user's modes"):
    from torch._C import _DisableAutocast as DisableAutocast
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
    from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals as inside_dispatch_mode

with needed_for("tensor parallelism"):
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor
    else:

        class DTensor:  # type: ignore[no-redef]
            """Class of no value, in a torch that has no distributed tensors."""


with needed_for("results that are nested in lists and dictionaries"):
    from torch.utils import _pytree as pytree
    from torch.utils._pytree import tree_leaves, tree_map

with needed_for("tensors whose values come later"):
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Run a compiled graph below the user's function modes, whose effects on the model are part of the graph."""
    with DisableTorchFunction() if function_modes() else contextlib.nullcontext():
        yield

"""Dynamo: its configuration, errors, guards, variables, and the classes whose methods capture wraps."""

from typing import Any

from dta_compile.torch_compat import needed_for

with needed_for("capturing a model's graph"):
    from torch._C._dynamo.eval_frame import reset_code
    from torch._C._dynamo.guards import DictGuardManager
    from torch._dynamo import config, maybe_mark_dynamic, trace_rules, utils
    from torch._dynamo.cache_size import _has_same_id_matched_objs as has_same_objects
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import OptimizedModule, innermost_fn, skip_code
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list as cache_entries_of
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        RestartAnalysis,
        ShortenTraceback,
        TensorifyScalarRestartAnalysis,
        UnspecializeRestartAnalysis,
        Unsupported,
    )
    from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder, GuardManagerType
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.source import AttrSource, ConstantSource, NumpyTensorSource, TypeSource
    from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
    from torch._dynamo.types import ConvertFrameReturn
    from torch._dynamo.utils import get_hook_for_recompile_user_context, register_hook_for_recompile_user_context
    from torch._dynamo.variables import (
        ConstantVariable,
        GetAttrVariable,
        LazyVariableTracker,
        ListVariable,
        NewGlobalVariable,
        SliceVariable,
        TensorVariable,
        TorchInGraphFunctionVariable,
        TupleVariable,
        UnspecializedNNModuleVariable,
        UserDefinedObjectVariable,
        UserFunctionVariable,
        builder,
    )
    from torch._dynamo.variables.base import (
        AttributeMutationNew,
        ValueMutationExisting,
        ValueMutationNew,
        VariableTracker,
    )
    from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
    from torch._dynamo.variables.ctx_manager import ContextWrappingVariable
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable
    from torch._dynamo.variables.lists import BaseListVariable, ListIteratorVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch._guards import ChainedSource, CompileContext, Source
    from torch.utils._device import DeviceContext

with needed_for("running code of a trace outside of it"):
    from torch.compiler import _is_compiling_flag  # set by name, since it is read from its module

# In torch 2.13, unlike 2.15, the contents of objects of users' classes, as of a dict's, have a variable of their own.
HAS_CONTENTS = hasattr(UserDefinedObjectVariable, "is_base_vt_modified")


def has_written_contents(value: UserDefinedObjectVariable, effects: Any) -> bool:
    """Return whether a trace with these side effects has written to what an object contains, besides attributes."""
    if HAS_CONTENTS:
        return bool(value.is_base_vt_modified(effects))
    return isinstance(value.mutation_type, ValueMutationExisting) and value.mutation_type.is_modified

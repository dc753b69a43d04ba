"""Functions that Dynamo traces once for all their calls. A torch without them traces every layer by itself."""

import torch

try:
    import torch._dynamo.variables.invoke_subgraph as reuse
    from torch._dynamo.config import inline_invoke_subgraph  # a setting that is patched by name
    from torch._dynamo.guards import GUARD_VALUE_DISPATCH, SKIP_GUARD, GuardBuilder, GuardCheckSpec
    from torch._dynamo.utils import build_invoke_subgraph_variable
    from torch._dynamo.variables.invoke_subgraph import (
        InputFingerprint,
        InputTag,
        LiftedCapturedSource,
        build_fingerprint_with_pytree,
        build_reuse_condition,
        classify_vt,
        has_mutated_vars,
        is_reusable,
        is_reuse_eligible,
        stamp_out_subgraph,
    )

    # Names of guards: two sources are one object; a tensor's properties, which each tensor gets of its own; a type; a
    # constant.
    IS_ONE, OF_TENSOR = GuardBuilder.DUPLICATE_INPUT.__name__, GuardBuilder.TENSOR_MATCH.__name__
    OF_TYPE = GuardBuilder.TYPE_MATCH.__name__
    OF_CONSTANT = {GuardBuilder.EQUALS_MATCH.__name__, GuardBuilder.CONSTANT_MATCH.__name__}
    WHY_NONE = ""
except (ImportError, AttributeError) as error:
    WHY_NONE = f"torch {torch.__version__} lacks it: {error}"

"""Tracing of functions to graphs of operators."""

from dta_compile.torch_compat import needed_for

with needed_for("tracing graphs of operators"):
    from torch._decomp import get_decompositions
    from torch._guards import TracingContext
    from torch._guards import tracing as in_context
    from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_modules
    from torch.fx.experimental import proxy_tensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, snapshot_fake, track_tensor
    from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen

with needed_for("records in torch's own trace of a compilation"):
    from torch._logging._internal import trace_structured

"""Find the values of a captured graph that autograd tracks, by running the graph under autograd on fake tensors.

`lower` calls this before it traces. Most graphs cannot detach a value; they are not run. Otherwise
autograd itself answers for every result of an operator, for views, in-place writes, gradient modes, frozen parameters
and custom functions. Writes that autograd does not see (under `no_grad`, through `.data` or a detached alias) are
refused: eager mode differentiates at the values before the write, which a functional graph no longer has.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any

import torch
from torch import fx

from dta_compile.attributes import attribute_set
from dta_compile.codegen.worker import reason
from dta_compile.errors import DTAError, FinalRefusal, RefusalError
from dta_compile.executable.as_captured import TAG_ACTIVATION_CHECKPOINT
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import name_of, tensors_of, written_by
from dta_compile.passes.symbols import SYMBOLIC, reads_number
from dta_compile.torch_compat import autograd
from dta_compile.torch_compat.autograd import (
    get_dynamic_layer_stack_depth,
    get_unwrapped,
    has_data_mutation,
    is_batchedtensor,
    pop_dynamic_layer_stack_and_undo_to_depth,
    sync,
)
from dta_compile.torch_compat.tensors import FunctionalTensor, enable_python_dispatcher, mb_unwrap_functional_tensor

# Torch's own functions, operators and methods by name whose floating-point results are all tracked by autograd if an
# argument is. None of them writes to an argument, detaches, or changes the gradient mode.
TRACKED_THROUGH = frozenset(
    """
    abs add addmm amax amin baddbmm bmm cat chunk clamp clamp_max clamp_min clone contiguous cos
    cross_entropy cummax cumprod cumsum div double dropout einsum embedding exp expand expand_as
    flatten flip float gather gelu getitem group_norm index_select layer_norm leaky_relu linear log
    log_sigmoid log_softmax logsigmoid logsumexp masked_fill matmul max maximum mean min minimum mm
    movedim mul narrow neg nll_loss norm normalize pad permute pow reciprocal relu repeat
    repeat_interleave reshape rms_norm roll rsqrt scaled_dot_product_attention select sigmoid silu
    sin softmax softplus sort split sqrt square squeeze stack sub sum swapaxes t tanh to topk
    transpose tril triu truediv type_as unbind unflatten unsqueeze view view_as view_as_complex
    view_as_real where
    """.split()  # noqa: SIM905
)
TRANSPOSED = ("T", "mT")  # attributes that are views
# Those that read nothing but the shape and dtype of a tensor.
OF_SHAPES = frozenset(["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"])
OF_TORCH = (None, "_operator", "torch", "torch._C._nn", "torch.functional", "torch.nn.functional")
HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
OF_FUNCTION = -1  # stands among the roots of a storage for a custom function's result that is a view of its argument
CACHES_CASTS = 3  # the position of `cache_enabled` in the arguments of torch's `_enter_autocast`


class Flow(enum.Enum):
    """Autograd's view of a tensor that an operator has returned."""

    TRACKED = "it has a derivative"
    CUT_OFF = "it lies in the memory of an argument, without a derivative"
    NEW = "it has memory of its own, and no derivative"


class CapturedInterpreter(fx.Interpreter):
    """Interpreter of one of Dynamo's graphs; refuses operators that torch cannot run with symbolic sizes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # our errors name the user's line themselves

    def run(self, *args: Any) -> Any:
        """Run the graph, and leave every level of `torch.func` that it entered, also after an error."""
        depth = get_dynamic_layer_stack_depth()
        try:
            return super().run(*args)
        finally:
            pop_dynamic_layer_stack_and_undo_to_depth(depth)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; raise RefusalError with the user's line if torch cannot."""
        try:
            with contextlib.ExitStack() as stack:
                if reads_number(n):  # for which the fake mode is to return a symbol
                    mode = mb_unwrap_functional_tensor(self.env[n.args[0]]).fake_mode  # type: ignore[attr-defined]
                    stack.enter_context(attribute_set(mode, "allow_scalar_outputs", True))
                return super().run_node(n)
        except DTAError:
            raise
        except Exception as error:
            raise RefusalError(
                "torch cannot trace this operation with symbolic sizes",
                where=where(n),
                expected="operations that work on any number of sequences and tokens",
                got=f"{n.target}: {reason(error)}",
                hint="write it with other operations, or move it out of the compiled function",
            ) from error

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and a checkpointed region inline."""
        if target is autograd.log_usage:
            return None
        if target is TAG_ACTIVATION_CHECKPOINT:
            body, *operands = args  # the runtime decides what to keep and what to recompute
            result = self.inside(body).run(*operands)
            if any(map(was_written, operands)):
                raise FinalRefusal(
                    "a buffer is written to in torch.utils.checkpoint, which runs the write twice",
                    where=where(next(iter(reversed(body.graph.nodes)))),
                    expected="writes outside of torch.utils.checkpoint",
                    got="a counter, say, that eager mode adds to in the forward and again in the backward",
                    hint="leave torch.utils.checkpoint out: the plan says what is kept and what is computed again",
                )
            return result
        if target is autograd.enter_autocast:
            # An autocast object from outside the graph carries its own flag for caching casts of weights. With the
            # cache on, casts of one trace would be constants of the next one.
            args = (*args[:CACHES_CASTS], False)
        return super().call_function(target, args, kwargs)

    def inside(self, body: fx.GraphModule) -> CapturedInterpreter:
        """Return an interpreter for a region of this graph."""
        raise NotImplementedError


class GradientFlow(CapturedInterpreter):
    """Interpreter that records the `Flow` of every result, run in the gradient mode that the graph was captured in.

    Attributes:
        flows: for each node, the flows of the tensors in its result.
        unseen: for each node that writes only to values that autograd does not track: the tracked values that it reads.
        may_detach: whether a value may be detached; if none is, nothing is run and `flows` stays empty.
    """

    def __init__(self, module: fx.GraphModule, outer: GradientFlow | None = None) -> None:
        super().__init__(module)
        self.may_detach = outer is not None or not torch.is_grad_enabled() or _may_cut(module.graph)
        self.flows: dict[fx.Node, list[Flow]] = {} if outer is None else outer.flows
        self.unseen: dict[fx.Node, list[fx.Node]] = {} if outer is None else outer.unseen
        # By storage, the tracked tensors in it; a view counts as its base.
        self._roots: dict[int, set[int]] = {} if outer is None else outer._roots
        self._owners: dict[int, int] = {} if outer is None else outer._owners  # root of the first tensor

    def inside(self, body: fx.GraphModule) -> GradientFlow:
        """Return an interpreter for a region, which shares this one's results."""
        return GradientFlow(body, self)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and record the flow of each of its results."""
        recorded = n.meta.get("example_value")
        if n.op == "call_method" and isinstance(recorded, SYMBOLIC):
            self.flows[n] = []
            return recorded  # a number read off a tensor, whose fake tensor has no data
        inputs = tensors([self.env[node] for node in n.all_input_nodes])
        versions = [value._version for value in inputs]
        result = super().run_node(n)
        written = [value for value, version in zip(inputs, versions, strict=True) if value._version != version]
        for value in written:
            self._wrote(n, value)
        if written and not any(map(_is_tracked, written)):
            self.unseen[n] = [arg for arg in n.all_input_nodes if any(map(_is_tracked, tensors([self.env[arg]])))]
        for value in tensors(result):
            self._owners.setdefault(_storage(value), _root(value))
        memory = {_storage(value) for value in inputs}
        if n.target is torch.ops.higher_order.autograd_function_apply:  # lowered as if its results were new
            for shared in memory.intersection(map(_storage, tensors(result))):
                self._roots.setdefault(shared, set()).add(OF_FUNCTION)
        self.flows[n] = [_flow(value, memory) for value in tensors(result)]
        for value in tensors(result):
            self._track(value)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, with inference mode as `no_grad`: inference tensors could not be differentiated later."""
        if target is autograd.enter_inference_mode:
            return torch.set_grad_enabled(torch.is_grad_enabled() and not args[0])
        if target is autograd.exit_inference_mode:
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)

    def reads_tracked(self, node: fx.Node) -> bool:
        """Return whether a node reads a tracked tensor, so that its results may be detached."""
        return self.may_detach and any(Flow.TRACKED in self.flows[argument] for argument in node.all_input_nodes)

    def needs_gradient(self, node: fx.Node) -> bool:
        """Return whether any reader of a value has a tracked result; if all detach it, it needs no gradient."""
        return any(
            user.op == "output" or not self.may_detach or Flow.TRACKED in self.flows[user] for user in node.users
        )

    def _wrote(self, node: fx.Node, value: torch.Tensor) -> None:
        known = self._roots.get(_storage(value), set())
        is_alias = _is_tracked(value) and self._owners.get(_storage(value)) != _root(value)
        if is_alias or (known and (not torch.is_grad_enabled() or known != {_root(value)})):
            raise RefusalError(
                "the model writes to a value with a gradient behind autograd's back",
                where=where(node),
                expected="writes that autograd records, or new values",
                got="a write in place under torch.no_grad(), to a detached alias, or to what a torch.autograd.Function"
                " got or returned as a view of it",
                hint="make a new value instead (x = x * 2, not x.mul_(2)); (y - x).detach() + x has the value of y and "
                "the gradient of x; a whole parameter may be written to before its first read, if the same write once "
                "more would change nothing (clamp_ with numbers)",
            )
        self._track(value)

    def _track(self, value: torch.Tensor) -> None:
        if _is_tracked(value):
            self._roots.setdefault(_storage(value), set()).add(_root(value))


def _may_cut(graph: fx.Graph) -> bool:
    """Return whether an operator on a tracked value may have an untracked result."""
    tracked, is_on = set(), True
    for node in graph.nodes:
        name = name_of(node)
        if node.target is autograd.set_grad_enabled:
            is_on = node.args[0]
        elif node.target is autograd.enter_inference_mode:
            return True
        elif node.op == "placeholder":
            if getattr(node.meta["example_value"], "requires_grad", False):
                tracked.add(node)
        elif not tracked.isdisjoint(node.all_input_nodes) and node.op != "output":
            results = tensors(node.meta.get("example_value"))
            if "example_value" in node.meta and not results:
                continue  # a size, say
            is_plain = node.op == "call_method" or getattr(node.target, "__module__", "") in OF_TORCH
            has_floats = any(value.is_floating_point() or value.is_complex() for value in results)
            if is_plain and results and (name in OF_SHAPES or not has_floats) and not written_by(node):
                continue
            is_transposed = node.target is getattr and node.args[1] in TRANSPOSED
            if not (is_on and (is_transposed or (is_plain and name in TRACKED_THROUGH))):
                return True
            tracked.add(node)
    return False


def _refuse_derivatives(module: fx.GraphModule) -> None:
    """Raise RefusalError for derivatives by `torch.func` and for hooks on gradients of values, which chunks cannot run.

    This happens before the run, because modes that `torch.func` switches off would stay off after an error.
    """
    for part in module.modules():
        nodes = list(part.graph.nodes) if isinstance(part, fx.GraphModule) else []
        for i, node in enumerate(nodes):
            if name_of(node) in HOOKS:
                raise RefusalError(
                    "a hook on the gradient of a value is registered inside of the compiled function",
                    where=where(node),
                    expected="gradients that autograd computes",
                    got=str(node.target),
                    hint="scale what it would scale after the last attention, or register hooks on parameters,"
                    " outside of the compiled function",
                )
            if node.target in autograd.BEGIN_DERIVATIVES:
                named = next((later for later in nodes[i:] if later.meta.get("stack_trace")), node)
                raise RefusalError(
                    "a derivative is taken inside of the compiled function (torch.func.grad, vjp, jvp, hessian)",
                    where=where(named),
                    expected="values; derivatives are taken of what the compiled function returns",
                    got="torch.func's own differentiation",
                    hint="take it outside of the compiled function, or write the derivative out",
                )


def gradient_flow(module: fx.GraphModule) -> GradientFlow:
    """Run a captured graph under autograd, in the current gradient mode, on the fake tensors that Dynamo recorded."""
    _refuse_derivatives(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [node.meta["example_value"] for node in placeholders]
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    flow = GradientFlow(module)
    if not flow.may_detach:
        return flow
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))  # restored on exit: the graph sets it
        flow.run(*(_fresh(value) for value in values))
    return flow


def _fresh(value: Any) -> Any:
    """Return an input as it was before Dynamo ran the graph, which may have written tracked values to it."""
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach().requires_grad_(value.requires_grad)
    return leaf if value.is_leaf or not value.requires_grad else leaf.clone()


def was_written(value: Any) -> bool:
    """Return whether an input of a functional trace has been written to."""
    if not isinstance(value, FunctionalTensor):
        return False
    sync(value)
    return bool(has_data_mutation(value.elem))


def tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in a result; for a slice of `torch.func.vmap`, the tensor that it maps over."""
    return list(map(whole, tensors_of(values)))


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `torch.func.vmap` maps over to get `value`; any other value as it is."""
    while is_batchedtensor(value):
        value = get_unwrapped(value)
    return value


def _flow(value: torch.Tensor, memory: set[int]) -> Flow:
    if _is_tracked(value):
        return Flow.TRACKED
    return Flow.CUT_OFF if _storage(value) in memory else Flow.NEW


def _is_tracked(value: torch.Tensor) -> bool:
    """Return whether autograd tracks a value: a view made under `no_grad` has `requires_grad`, but no derivative."""
    return value.grad_fn is not None or (value.requires_grad and not value._is_view())


def _root(value: torch.Tensor) -> int:
    return int((value if value._base is None else value._base)._cdata)


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)

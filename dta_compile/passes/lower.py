"""lower: Dynamo's graph of Python-level calls becomes a functional ATen graph with one opaque attention op.

Every later pass sees a closed set of functional operators with fake tensors of symbolic shape in `meta["val"]`,
and in `meta["stack_trace"]` the user's line. In-place operations are gone (functionalised), autocast is spelled out as
casts, and values that autograd must not follow (no_grad regions, `.detach()`) are marked by `aten.detach`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dta_compile.errors import DTAError, RefusalError
from dta_compile.passes import decompositions, opaque, row_loops
from dta_compile.passes.followed import Followed, requires_grad
from dta_compile.passes.new_values import write_to_new_values
from dta_compile.passes.program import Input, InputKind, Program, output_node, where
from dta_compile.passes.size_nodes import sizes_from_inputs

aten = torch.ops.aten

LIBRARY = torch.library.Library("dta", "DEF")
LIBRARY.define(
    "attention_call(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) -> Tensor"
)


@torch.library.register_fake("dta::attention_call", lib=LIBRARY)
def _attention_call_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def lower(program: Program) -> None:
    """Fill `program.inputs`, `.module` and `.placeholders` from `program.captured`."""
    captured = program.captured
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    program.inputs = [_describe(i, node) for i, node in enumerate(placeholders)]
    module = _trace(program, functional=False)
    if not write_to_new_values(module.graph):
        module = _trace(program, functional=True)  # takes half as long again, for models that write in place
    _flatten_output(module)
    opaque.embed(module)
    decompositions.spell_out_constructors(module.graph)
    decompositions.drop_empty_parts(module.graph)
    row_loops.undo_row_loops(module.graph)
    sizes_from_inputs(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    program.module = module
    program.placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]


def _trace(program: Program, functional: bool) -> fx.GraphModule:
    """The captured graph as ATen operators; `functional` turns what is written in place into new values."""
    placeholders = [node for node in program.captured.graph.nodes if node.op == "placeholder"]
    fakes = [node.meta["example_value"] for node in placeholders]
    mode = next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None)
    mutated: list[int] = []

    def run(*args: Any) -> Any:
        with _AttentionCapture(), torch.no_grad():
            return _DetachingInterpreter(program.captured).run(*args)

    def run_functional(*args: Any) -> Any:
        with FunctionalTensorMode():
            wrapped = [_to_functional(arg) for arg in args]
            results = run(*wrapped)
            mutated.extend(i for i, arg in enumerate(wrapped) if _was_mutated(arg))
            return pytree.tree_map(_from_functional, results)

    with (
        mode or contextlib.nullcontext(),
        enable_python_dispatcher(),
        fx.traceback.preserve_node_meta(),
        _no_autocast_cache(),
    ):
        function = run_functional if functional else run
        module = make_fx(function, decomposition_table=decompositions.TABLE, _allow_non_fake_inputs=True)(*fakes)
    for index in mutated:
        raise _mutation_refusal(program.inputs[index], placeholders[index])
    return module


class _AttentionCapture(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by the opaque `dta::attention_call`, and skips dropout with p = 0."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _capture_attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout) and _dropout_is_identity(*args, **kwargs):
            return args[0] if args else kwargs["input"]
        if func in MATMULS and not kwargs and _broadcasts(*args):
            return _matmul_without_expanding(*args)
        return func(*args, **kwargs)


MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


def _broadcasts(left: Any, right: Any) -> bool:
    return isinstance(right, torch.Tensor) and left.dim() > right.dim() >= 3


def _matmul_without_expanding(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`[B, H, S, D] @ [H, D, E]`: torch would expand the weights to every sequence and merge batch with heads."""
    extra = "abcdefgh"[: left.dim() - right.dim()]
    shared = "ijklmn"[: right.dim() - 2]
    return torch.einsum(f"{extra}{shared}xy,{shared}yz->{extra}{shared}xz", left, right)


def _dropout_is_identity(input: Any, p: float = 0.5, train: Any = True, *args: Any, **kwargs: Any) -> bool:
    return p == 0 or not kwargs.get("training", train)


def _capture_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p:
        raise RefusalError(
            "attention dropout cannot run over a prefix tree: every rollout would need its own random mask",
            where=where_now(),
            expected="dropout_p=0.0",
            got=f"dropout_p={dropout_p}",
            hint="set the model's attention dropout to 0, or call model.eval()",
        )
    if query.dim() == 3:
        # A constant in front counts the heads of one sequence; another size counts sequences of one head.
        dim = 0 if isinstance(query.shape[0], int) else 1
        mask = attn_mask.unsqueeze(dim) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        query, key, value = (tensor.unsqueeze(dim) for tensor in (query, key, value))
        return _capture_attention(query, key, value, mask, 0.0, is_causal, scale, enable_gqa).squeeze(dim)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise RefusalError(
            "attention over tensors of this rank is not supported",
            where=where_now(),
            expected="query, key and value of shape [batch, heads, tokens, head_dim]",
            got=f"rank {query.dim()}",
        )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # The real operator is on autocast's lower-precision list; the opaque one has to say so itself.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t if t.dtype is torch.float64 else t.to(dtype) for t in (query, key, value))
    return torch.ops.dta.attention_call(query, key, value, attn_mask, is_causal, scale)


class _DetachingInterpreter(fx.Interpreter):
    """Runs Dynamo's graph and marks each value that autograd would not have followed."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # our errors name the place themselves
        self.followed = Followed()

    def run_node(self, n: fx.Node) -> Any:
        inputs = [(node, self.env[node]) for node in n.all_input_nodes if isinstance(self.env[node], torch.Tensor)]
        versions = [value._version for _, value in inputs]
        try:
            result = super().run_node(n)
        except DTAError:
            raise
        except Exception as error:
            raise RefusalError(
                "torch cannot trace this operation with symbolic sizes",
                where=where(n),
                expected="operations that work on any number of sequences and tokens",
                got=f"{n.target}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}",
                hint="write it with other operations, or move it out of the compiled function",
            ) from error
        for (node, value), version in zip(inputs, versions, strict=True):
            if value._version != version:
                self.followed.wrote(n, node)
        self.followed.made(n)
        if n.op in ("call_function", "call_method") and _stops_gradient(n) and isinstance(result, torch.Tensor):
            return result.detach()
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(target, "__name__", "")
        if name == "_set_grad_enabled":
            self.followed.is_recording = bool(args[0])
        if name in ("_log_api_usage_once", "_set_grad_enabled"):
            return None  # gradient mode was read off the recorded values already
        if name == "autograd_function_apply":
            return opaque.capture(args, kwargs)
        if name == "tag_activation_checkpoint":
            body, *operands = args  # the runtime decides what to keep and what to recompute
            return _DetachingInterpreter(body).run(*operands)
        return super().call_function(target, args, kwargs)


def _stops_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not value.requires_grad
        and any(requires_grad(argument) for argument in node.all_input_nodes)
    )


def _describe(index: int, node: fx.Node) -> Input:
    value = node.meta["example_value"]
    grapharg = node.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    name = source.name if source is not None else node.name
    name = name() if callable(name) else str(name)
    if not isinstance(value, torch.Tensor):
        return Input(index, name, InputKind.SIZE, False)
    example = getattr(grapharg, "example", None)
    dynamic = any(not isinstance(size, int) for size in value.shape)
    if isinstance(value, torch.nn.Parameter) or isinstance(example, torch.nn.Parameter):
        kind = InputKind.PARAMETER
    elif value.requires_grad:
        kind = InputKind.DIFFERENTIABLE_DATA if dynamic else InputKind.PARAMETER
    else:
        kind = InputKind.DATA
    return Input(index, name, kind, value.requires_grad)


def _to_functional(arg: Any) -> Any:
    return FunctionalTensor.to_functional(arg) if isinstance(arg, torch.Tensor) else arg


def _from_functional(result: Any) -> Any:
    if isinstance(result, FunctionalTensor):
        torch._sync(result)  # type: ignore[attr-defined]
        return torch._from_functional_tensor(result.elem)
    return result


def _was_mutated(arg: Any) -> bool:
    if not isinstance(arg, FunctionalTensor):
        return False
    torch._sync(arg)  # type: ignore[attr-defined]
    return bool(torch._functionalize_has_data_mutation(arg.elem))  # type: ignore[attr-defined]


def _mutation_refusal(mutated: Input, placeholder: fx.Node) -> RefusalError:
    return RefusalError(
        f"the model writes to {mutated.name}, so running it over a tree would write different values",
        where=where(next(iter(placeholder.users), placeholder)),
        expected="a forward pass that leaves its parameters, buffers and inputs as they are",
        got=f"an in-place update of {mutated.name}",
        hint="move the update out of the compiled function (batch-norm statistics: call .eval() on that module)",
    )


def _flatten_output(module: fx.GraphModule) -> None:
    node = output_node(module.graph)
    if not isinstance(node.args[0], (tuple, list)):
        node.args = ((node.args[0],),)


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast's weight-cast cache would hand traced casts to whoever runs next."""
    previous = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(previous)


def where_now() -> str:
    """The user's source line of the node that is being traced."""
    meta = fx.traceback.get_current_meta()
    probe = fx.Graph().placeholder("traced")
    probe.meta = dict(meta)
    return where(probe)

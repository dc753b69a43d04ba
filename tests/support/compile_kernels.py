"""Compile all kernels for a Hopper GPU, which needs no GPU: `python -m tests.support.compile_kernels`.

Triton's interpreter accepts kernels that its compiler may reject. Prints one line per kernel.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dta_compile.ops.experts import kernels as grouped_kernels
from dta_compile.ops.experts import products as grouped_products
from dta_compile.ops.lm_head import by_kernels
from dta_compile.ops.lm_head import kernels as head_kernels
from dta_compile.runtime.attention import triton_kernels as kernels

KERNELS = (kernels.forward_kernel, kernels.queries_kernel, kernels.own_keys_kernel, kernels.stack_keys_kernel)
STATISTICS = ("logsumexp", "delta", "grad_key", "grad_value")
SHARED_MEMORY = 227 * 1024  # per thread block


def kind_of(name: str, constants: dict, dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in ("tokens", "limit", "splits") or name.endswith(("_head", "_row")):
        return "i32"
    return {"table": "*i32", "scale": "fp32", "softcap": "fp32"}.get(
        name, "*fp32" if name in STATISTICS else f"*{dtype}"
    )


def main() -> None:
    for dtype, width, limit, capped, queries, keys in (
        ("bf16", 128, "", False, 64, 64),
        ("bf16", 128, "window", True, 16, 64),
        ("fp32", 64, "chunk", False, 32, 32),
        ("bf16", 256, "", True, 64, 32),
    ):
        constants = {
            "GROUPS": 2,
            "KEY_DIM": width - 8,
            "VALUE_DIM": width,
            "KEY_WIDTH": width,
            "VALUE_WIDTH": width,
            "LIMITED": bool(limit),
            "UNITS": capped,
            "CHUNKED": limit == "chunk",
            "CAPPED": capped,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
            "QUERIES": queries,
            "KEYS": keys,
            "GOES_ON": width == 128,
            "SHARED": width == 128,
        }
        for kernel in KERNELS:
            own = {name: value for name, value in constants.items() if name in kernel.arg_names}
            signature = {name: kind_of(name, own, dtype) for name in kernel.arg_names}
            print(f"{dtype} {width}:", compiled(kernel, signature, own, {"num_warps": 8, "num_stages": 1}))
    for dtype in ("bf16", "fp32"):
        precision = {"PRECISION": "ieee" if dtype == "fp32" else "tf32"}
        for kernel, constants in (
            (grouped_kernels.add_kernel, {"LEFT": 768, "RIGHT": 2048, **grouped_products.ADD_BLOCKS}),
            (grouped_kernels.linear_kernel, {"WIDTH": 2048, "OUT": 768, **grouped_products.LINEAR_BLOCKS}),
        ):
            pointers = {"order": "*i64", "bounds": "*i64", "total": "*fp32"}
            tensors = dict.fromkeys(("left", "right", "rows", "weight", "out"), f"*{dtype}")
            signature = {
                name: "constexpr" if name in {**constants, **precision} else {**pointers, **tensors}.get(name, "i32")
                for name in kernel.arg_names
            }
            print(f"{dtype}:", compiled(kernel, signature, {**constants, **precision}, {}))
    for dtype, scaled, capped, mean, chosen, labels in (
        ("bf16", False, False, False, 1, 1),
        ("bf16", True, True, True, 3, 4),
        ("fp32", True, False, False, 0, 0),
        ("fp32", False, True, True, 40, 64),
    ):
        constants = {"SCALED": scaled, "CAPPED": capped, "MEAN": mean, "TOTAL": capped, "BEST": capped}
        constants |= {"CHOSEN": chosen, "LABELS": labels, "COLUMNS": by_kernels.COLUMNS}
        for kernel in (head_kernels.update_kernel, head_kernels.gradient_kernel):
            numbers = dict.fromkeys(("logits_row", "columns", "start", "temperature_row", "inverse_cap_row"), "i32")
            indices = dict.fromkeys(("labels", "best"), "*i64")
            kinds = {"logits": f"*{dtype}", **indices, **numbers, **dict.fromkeys(constants, "constexpr")}
            signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
            aligned = ("logits", "logits_row", "columns")  # as the specialisation at a call finds them
            options = {"num_warps": by_kernels.WARPS}
            own = {name: value for name, value in constants.items() if name in kernel.arg_names}
            print(f"{dtype} {chosen}:", compiled(kernel, signature, own, options, aligned))


def compiled(kernel, signature: dict, constants: dict, options: dict, aligned: tuple[str, ...] = ()) -> str:
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions, attrs=attributes)
    shared = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared
    assert shared <= SHARED_MEMORY, (kernel.fn.__name__, shared)
    return f"{kernel.fn.__name__}: {shared} bytes of shared memory"


if __name__ == "__main__":
    main()

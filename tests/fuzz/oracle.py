"""What a drawn program comes to: equal, refused, wrong, crashed or discarded. Printed whole into failing scripts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dta_compile import records
from dta_compile.backend import BUG
from dta_compile.errors import RefusalError, RuntimeContractError

TOLERANCE = 1e-9  # relative, in float64
NOISE_FLOOR = 1e-6  # a gradient that is zero but for rounding is compared on the scale of the others
ROUNDINGS, AT_MOST = 8, 1e-12  # what cancels may differ by so many of its own rounding errors, if those are small
PERTURBATION, STEEPEST = 1e-13, 1e5  # programs that magnify rounding more than that show nothing


def judge(make: Callable[[], Any], seen: Callable[..., tuple[Any, ...]], calls: list[dict[str, Any]], options: Any):
    """The verdict on `make()` called with each of `calls`, and what to say about it.

    Args:
        make: builds the module; called anew, from one seed, wherever its state must be fresh.
        seen: the arguments of a call -> for every output a bool mask of what counts (padding does not), or None.
        calls: keyword arguments, call by call.
        options: those of the backend.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _judge(make, seen, calls, options)
    finally:
        torch.set_default_dtype(before)
        torch._dynamo.reset()


def _judge(make, seen, calls, options):
    try:
        expected = [measure(model, model, seen, call) for model in [seeded(make)] for call in calls]
        shaken = [measure(model, model, seen, call) for model in [perturbed(seeded(make))] for call in calls]
    except Exception as error:
        return "discarded", f"eager: {type(error).__name__}: {error}"
    if not all(torch.isfinite(t).all() for one in expected for t in one.values() if t.is_floating_point()):
        return "discarded", "eager: not finite"
    steepest = max(difference(*pair) for pair in zip(shaken, expected, strict=True))
    if not steepest <= PERTURBATION * STEEPEST:
        return "discarded", "eager: magnifies rounding"
    verdict = attempt(make, seen, calls, expected, backend="dta", options={"verify": "off", **options})
    if verdict[0] in ("wrong", "crashed"):
        plain = attempt(make, seen, calls, expected, backend="eager")
        if plain[0] != "equal":
            return "discarded", f"torch.compile without dta: {plain[1]}"
    return verdict


def attempt(make, seen, calls, expected, **compilation):
    """The calls through torch.compile."""
    torch._dynamo.reset()
    model = seeded(make)
    compiled = torch.compile(model, **compilation)
    for number, (call, wanted) in enumerate(zip(calls, expected, strict=True)):
        try:
            found = measure(compiled, model, seen, call)
        except (RefusalError, RuntimeContractError) as error:
            if not error.what or error.what == BUG:
                return "crashed", str(error) or "a typed error that names nothing"
            return "refused", str(error)
        except Exception as error:
            return "crashed", f"call {number}: {type(error).__name__}: {error}"
        if found.keys() != wanted.keys():
            return "wrong", f"call {number}: on one side only: {sorted(found.keys() ^ wanted.keys())}"
        worst = {name: difference({name: found[name]}, {name: wanted[name]}, wanted) for name in wanted}
        beyond = {name: error for name, error in worst.items() if not error <= TOLERANCE}
        if beyond:
            beyond = _without_rounding(beyond, found, wanted, [rounded(make, seen, calls, n)[number] for n in range(3)])
        if beyond:
            return "wrong", f"call {number}: " + ", ".join(f"{name} {error:.2g}" for name, error in beyond.items())
    return "equal", "" if records.of(compiled).engines else "dense"


def seeded(make):
    torch.manual_seed(0)
    return make()


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + PERTURBATION * torch.randn_like(parameter))
    return model


class Rounded(TorchDispatchMode):
    """Monte Carlo arithmetic (Parker, 1997): every result is off by one unit in its last place, at random."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if any(result.alias_info is not None for result in func._schema.returns):
            return results
        return tree_map_only(torch.Tensor, self._off, results)

    def _off(self, value):
        if value.is_floating_point() and value.numel():
            unit = torch.finfo(value.dtype).eps
            value.mul_(1 + unit * torch.randint(-1, 2, value.shape, generator=self.generator, dtype=value.dtype))
        return value


def rounded(make, seen, calls, seed):
    """What eager gives call by call under other rounding errors, which shows how large they are."""
    model = seeded(make)
    with sdpa_kernel(SDPBackend.MATH):
        found = []
        for call in calls:
            with Rounded(seed):
                found.append(measure(model, model, seen, call))
        return found


def _without_rounding(beyond, found, wanted, others):
    """Of the errors those that rounding does not explain, nor could if it were larger than what is read as rounding."""
    most, left = AT_MOST * _largest_gradient(wanted), {}
    for name, error in beyond.items():
        noise = max(_distance(other[name], wanted[name]) for other in others)
        noise = noise if noise == noise else float("inf")  # programs that rounding breaks: what is read as rounding
        if error == float("inf") or not _distance(found[name], wanted[name]) <= min(ROUNDINGS * noise, most):
            left[name] = error
    return left


def _distance(one, other):
    return float((one.double() - other.double()).abs().max()) if other.numel() else 0.0


def _largest_gradient(values):
    return max((float(t.abs().max()) for name, t in values.items() if name[0] == "g" and t.numel()), default=0.0)


def measure(function, model, seen, call):
    """Outputs, zero where they do not count, gradients of a weighted sum of them for every parameter, and buffers."""
    model.zero_grad()
    outputs = function(**call)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found, loss = {}, 0
    for index, (output, mask) in enumerate(zip(outputs, seen(**call), strict=True)):
        if mask is not None:
            output = torch.where(mask.reshape(*mask.shape, *(1,) * (output.dim() - mask.dim())), output, 0)
        found[f"output {index}"] = output.detach().clone()
        if output.requires_grad:
            generator = torch.Generator().manual_seed(index)
            loss = loss + (output * torch.randn(output.shape, generator=generator)).sum()
    if isinstance(loss, torch.Tensor):
        loss.backward()
    found |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    model.zero_grad()
    return found


def difference(found, wanted, scales=None):
    """The largest difference, relative to the largest entry of each tensor."""
    scale = _largest_gradient(scales or wanted)
    worst = 0.0
    for name, want in wanted.items():
        got = found[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            return float("inf")
        if want.numel():
            size = max(float(want.abs().max()), scale * NOISE_FLOOR if name[0] == "g" else 0.0, 1e-12)
            error = _distance(got, want) / size
            worst = max(worst, error if error == error else float("inf"))
    return worst

"""Is a program under a layout right: losses, gradients and buffers are eager torch's to 1e-10.

A refusal by an `AutoparError` with a reason is counted; any other error, and a difference, is a
fault. Where eager torch itself moves by as much when its inputs move by one unit of precision, a
difference says nothing.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.capture import PositionalRandom, draws_of
from autopar.errors import AutoparError, DivergenceError, VerificationError
from autopar.passes.analysis import Analysis
from autopar.program.lines import StageProgram, parse_programs, program_text
from tests.fuzz.programs.draw import loss_of
from tests.fuzz.programs.layouts import ALONE, Layout
from tests.fuzz.programs.program import Program
from tests.helpers.captures import captured
from tests.helpers.plans import pipeline_of
from tests.helpers.random_programs import faults, laid_out
from tests.helpers.ranks import TOLERANCE, relative_error

RIGHT, REFUSED, FAULT = "right", "refused", "fault"
N_STEPS = 2
# Above it, an error is of no smooth function: no program that is drawn magnifies rounding so much.
LARGE = 1e-4
# One stage, or several, by the number of ranks.
SHAPES = {
    1: (((1,),),),
    2: (((2,),), ((1, 1), (1, 1))),
    4: (((2, 2),), ((4,),), ((2, 1), (1, 2)), ((1, 1),) * 4, ((2,), (1,), (1,))),
}


@dataclass(frozen=True)
class Outcome:
    """What a run came to; `key` is equal for faults of one kind."""

    what: str
    key: str = ""
    text: str = ""


def outcome(program: Program, layout: Layout = ALONE) -> Outcome:
    """Run a program under a layout beside eager torch."""
    try:
        with quiet():
            wrong: Mapping[str, Any]
            if layout == ALONE:
                wrong = _errors_alone(program)
            elif layout.placements is None:
                wrong = _errors_planned(program, layout)
            else:
                wrong = _errors_placed(program, layout)
    except (VerificationError, DivergenceError) as error:  # what no user's program may see
        return Outcome(FAULT, f"{type(error).__name__}", f"{error}")
    except AutoparError as error:
        first = str(error).splitlines()[0]
        return Outcome(REFUSED, f"{type(error).__name__}: {first}", str(error))
    except Exception as error:  # noqa: BLE001  (what is counted here is any other error)
        return Outcome(FAULT, _key(error), traceback.format_exc(limit=-6))
    if wrong and not _is_ill_conditioned(program, wrong):
        names = ", ".join(f"{name} {error}" for name, error in list(wrong.items())[:6])
        return Outcome(FAULT, "difference", f"differs from eager: {names}")
    return Outcome(RIGHT)


def _key(error: Exception) -> str:
    """The error, and the last line of autopar on its way."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/autopar/" in f.filename or "/passes/" in f.filename]
    own += [f for f in frames if "/runtime/" in f.filename]
    at = f" in {own[-1].name}" if own else ""
    return f"{type(error).__name__}{at}"


@contextmanager
def quiet() -> Iterator[None]:
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def eager_step(
    net: nn.Module, batch: dict[str, Tensor], seed: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step of eager torch; gradients add up. With `seed` random numbers are those
    of the captured program.

    Each gradient gets memory of its own: that of `m` and that of `n` in `m + n.t()` are one tensor,
    to which torch would add both of the next step.
    """
    if seed is None:
        loss = loss_of(net(**batch))
        loss.backward()
    else:
        with PositionalRandom(seed):
            loss = loss_of(net(**batch))
            loss.backward()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
    return loss.detach(), state_of(net)


def state_of(net: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers by name; a gradient that is None is 0."""
    found = {
        f"grad {name}": torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in net.named_parameters()
        if p.requires_grad
    }
    return found | {name: buffer.clone() for name, buffer in net.named_buffers()}


def captured_operators(program: Program) -> list[str]:
    """The operators of a program, or none if it is refused."""
    with quiet():
        net, batch = program.build()
        try:
            graph = captured(net, batch, precision="fp64").graph
        except AutoparError:
            return []
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def _errors_alone(program: Program) -> dict[str, float]:
    """The generated step beside eager, twice: gradients add up and buffers move on."""
    net, batch = program.build()
    pm = autopar.parallelize(net, (1, 1), batch, manual=autopar.Manual())
    assert pm.plan.bound is not None
    for stage in pipeline_of(pm.plan).stages:
        text = program_text(stage)  # compared as text, since NaNs are never equal
        assert "".join(map(program_text, parse_programs(text, StageProgram))) == text
    is_random = bool(draws_of(pm.plan.bound.analysis.program))
    wrong: dict[str, float] = {}
    for _ in range(N_STEPS):
        seed = pm.stream.seed if is_random else None
        given: dict[str, Any] = {name: value.clone() for name, value in batch.items()}
        loss = pm.step(**given)
        wanted, state = eager_step(net, {n: v.clone() for n, v in batch.items()}, seed)
        found = state_of(pm)
        errors = {"loss": relative_error(loss, wanted)} | {
            name: relative_error(found[name], value)
            for name, value in state.items()
            if name in found
        }
        errors |= {name: float("inf") for name in state.keys() - found.keys()}
        wrong |= {name: e for name, e in errors.items() if not e <= TOLERANCE}
    return wrong


def _errors_planned(program: Program, layout: Layout) -> dict[str, float]:
    """`autopar.verify` under the options of a layout."""
    net, batch = program.build()
    options: dict[str, Any] = {
        name: eval(value, {"Manual": autopar.Manual}) for name, value in layout.options
    }
    report = autopar.verify(net, layout.mesh, batch, precision="fp64", **options)
    if report.ok:
        return {}
    errors = [(f"sharded {name}", e) for name, e in report.errors.items()]
    errors += [(f"captured {name}", e) for name, e in report.capture_errors.items()]
    return {name: e for name, e in errors if not e <= TOLERANCE} or {"report": 1.0}


def _errors_placed(program: Program, layout: Layout) -> dict[str, Any]:
    """A legal strategy of which every choice is drawn, cuts and recompute too; calls count."""
    rng = Random(layout.placements)
    net, batch = program.build()
    analysis = Analysis.of(captured(net, batch, precision="fp64"))
    one_stage, *others = SHAPES[layout.n_ranks]
    n_operators = len(list(analysis.program.operators))
    shapes = rng.choice([one_stage, *(s for s in others if len(s) < n_operators)])
    return faults(laid_out(analysis, batch, program.seed, shapes, rng))


def _is_ill_conditioned(program: Program, wrong: Mapping[str, Any]) -> bool:
    """Does eager torch move by a tenth of the error if what it computes moves by rounding?

    Small errors: if inputs and weights move by an ulp. Large ones are of steps, such as the sign of
    what is 0 but for rounding: if the result of each operator moves by some ulps of its largest.
    """
    if not all(isinstance(e, float) and e < math.inf for e in wrong.values()):
        return False
    error, moved = max(wrong.values()), 0.0
    net, batch = program.build()
    loss, state = eager_step(net, batch, seed=1)
    for k in range(2):
        other, near = program.build()
        generator = torch.Generator().manual_seed(k)
        if error < LARGE:
            with torch.no_grad():
                for value in (*other.parameters(), *near.values()):
                    if value.is_floating_point():
                        value.mul_(1 + 4e-16 * _noise(value, generator))
            found, shifted = eager_step(other, near, seed=1)
        else:
            with _Rounding(generator):
                found, shifted = eager_step(other, near, seed=1)
        errors = [relative_error(shifted[name], value) for name, value in state.items()]
        moved = max(moved, relative_error(found, loss), *errors)
    return moved > error / 10


def _noise(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.5


class _Rounding(TorchDispatchMode):
    """Moves every new real result by some ulps of its largest element. What is 0, infinite or no
    number stays so: it is by choice, and moving it would excuse real faults."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_new = all(r.alias_info is None for r in func._schema.returns)
        for value in (out if isinstance(out, tuple) else (out,)) if is_new else ():
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                largest = value.abs().nan_to_num(posinf=0.0).max()
                noise = _noise(value, self._generator) * (2e-14 * largest)
                value.add_(noise.where(value.isfinite() & (value != 0), 0.0))
        return out

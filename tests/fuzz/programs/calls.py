"""The calls that a program makes of operators with rules, and the oracle of rules over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture import reference_step, whole_buffers
from autopar.errors import AutoparError, VerificationError
from autopar.oracle import MESHES, OracleCase, check_strategy, combinations
from autopar.rules import has_rule, rule_for
from tests.fuzz.programs.compare import quiet
from tests.fuzz.programs.program import Program
from tests.helpers.captures import captured

LARGEST, SMALLEST = 4.0, 1e-2
# The share of the largest value that every value but 0 has at least.
NEAREST = 0.02
# Numbers are drawn again where one is what cancellation leaves: a wrong rule is wrong for all.
N_TRIES = 3
# Placements that are drawn of one call on each mesh beside all of them on two ranks.
N_DRAWN = 3


@dataclass
class Calls(TorchFunctionMode):
    """Records calls; their arguments are whole tensors."""

    found: list[tuple[Any, tuple[Any, ...], Mapping[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload) and has_rule(str(func)):
            self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def calls_of(program: Program) -> list[tuple[Any, tuple[Any, ...], Mapping[str, Any]]]:
    """The calls of a captured program in a step; none if it is refused."""
    with quiet():
        net, batch = program.build()
        try:
            graph = captured(net, batch, precision="fp64")
        except AutoparError:
            return []
        with Calls() as calls:
            parameters, buffers = dict(net.named_parameters()), whole_buffers(graph, net)
            reference_step(graph, parameters, batch, buffers, fuses_biases=False)
    return calls.found


def check_rules(program: Program, seed: int) -> Iterator[str]:
    """Check placements of every call that is unlike those before; yields the operators."""
    rng, seen = Random(seed), set[str]()
    generator = torch.Generator().manual_seed(seed)
    for op, args, kwargs in calls_of(program):
        text = f"{op} {pytree.tree_map_only(Tensor, _described, (args, kwargs))}"
        if text in seen:
            continue
        seen.add(text)
        for n_left in reversed(range(N_TRIES)):
            given = pytree.tree_map_only(Tensor, lambda v: _tame(v, generator), (args, kwargs))
            try:
                _check(op, given, rng)
                break
            except VerificationError:
                if not n_left:
                    raise
        yield str(op)


def _check(op: Any, given: tuple[Any, Any], rng: Random) -> None:
    """Every placement on two ranks; some of each mesh where every factor is split in two."""
    rule = rule_for(str(op))
    case = OracleCase.of(rule, op, *given)
    for strategies in combinations(case, (2,)):
        check_strategy(case, strategies, (2,))
    case = OracleCase.of(rule, op, *given, refine=True)
    for sizes in MESHES:
        legal = list(combinations(case, sizes))
        for strategies in rng.sample(legal, min(N_DRAWN, len(legal))):
            check_strategy(case, strategies, sizes)


def _tame(value: Tensor, generator: torch.Generator) -> Tensor:
    """Real values of the size that the oracle's tolerance is for, no two of them equal or opposite:
    of a difference that is 0 but for rounding, nothing can be asked.

    None but zeros are close to 0: quotients by them are as large as rounding errors of others.
    """
    if not (value.is_floating_point() and value.numel()):
        return value
    largest = value.detach().abs().max().item()
    if 0.0 < largest < math.inf:
        wanted = 1.0 if largest < SMALLEST else min(largest, LARGEST)
        value = value * (wanted / largest * (1 - NEAREST))
        value = value + value.detach().sign() * (wanted * NEAREST)
    noise = torch.rand(value.shape, generator=generator, dtype=value.dtype)
    return value * (1 - 0.1 * noise)


def _described(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.requires_grad}"

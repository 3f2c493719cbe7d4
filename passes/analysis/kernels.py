"""Which operators a compiler makes one kernel of, and what each of them then reads and writes.

Pointwise operators, reductions and norms that follow each other are one kernel. It reads each value
once, and writes what others read or what is kept for backward; the rest never reaches memory. The
price of a kernel is a sum over its operators:

    forward     values that it is the first to read, and its results that others read or keep
    backward    the gradients of both, and kept values that it is the first to read
    again       what a kernel that runs again in backward moves more than if its values were kept:
                forward writes none of them, and backward makes them as it needs them. If that is
                less, running again is free
    launches    of the first operator

No part of a kernel are matmuls, attention, random draws, operators with a lowering of their own,
and sums that add a bias to a matmul, because both are one call. A kernel is of one region: of one
block, and without an operator between that no compiler takes (`autopar/codegen/regions.py`). None
of its values depends on another one through an operator outside. Views are free.

A software's own kernels (`KernelMode` "fused") go further. They keep nothing inside: backward makes
it again from what they read, or from what they write for others. They add biases: in front of a
kernel, or in the matmul if none follows. With "fused+loss" cross-entropy is one with its casts.

This is a fact of the whole program, whatever its placements are. A reshard between two operators of
a kernel costs its own price alone. Where stages are cut, kernels end; so a stage moves no less than
its operators do in the whole, and sums of the whole are lower bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.cost.hardware import KernelMode
from autopar.measured import Saved
from autopar.placement import TensorType
from autopar.program.graph import Operator, Program
from autopar.program.lines import RegionNumbers, is_compilable_call, is_fused
from autopar.rules import rule_for

_LOSS = "aten.cross_entropy_loss.default"


@dataclass(frozen=True)
class FusedTraffic:
    """What an operator of a kernel moves.

    forward, backward, again   per operand, inputs before results, how many times its bytes
    launches                   of the three: 1 for the operator that counts for its kernel, else 0
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    again: tuple[float, ...]
    launches: tuple[int, int, int]


# A bias in a matmul's own kernel: backward sums its gradient. Operands: matmul, bias, sum.
_IN_MATMUL = FusedTraffic((0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0), (0, 1, 0))


@dataclass(frozen=True)
class Kernels:
    """The kernels of a whole program.

    `numbers` maps operator -> its kernel; those that fuse with no other have none. `roots` maps
    view -> the value that it shows. `lone_biases` are sums that a software's matmuls do themselves.
    """

    numbers: Mapping[str, int]
    roots: Mapping[str, str]
    lone_biases: frozenset[str] = frozenset()

    @staticmethod
    def of(
        program: Program, operators: Sequence[Operator], bias_adds: Collection[str],
        mode: KernelMode = "compiled",
    ) -> Kernels:  # fmt: skip
        """`bias_adds` are the sums that add a bias to a matmul (`Analysis.bias_adds`)."""
        own_biases = mode == "compiled"
        roots: dict[str, str] = {}
        made: dict[str, _Place] = {}
        kernels: dict[str, str] = {}  # operator -> an earlier operator of its kernel, or itself
        regions = RegionNumbers()

        def first(name: str) -> str:
            while kernels[name] != name:
                name = kernels[name]
            return name

        for operator in operators:
            op = str(operator.call.op)
            rule = rule_for(op)
            sources = [roots.get(name, name) for name in operator.inputs]
            if rule.view:
                roots |= {name: sources[0] for name in operator.outputs if sources}
                continue
            region = regions.next(is_compilable_call(op), program.block(operator.name))
            is_light = rule.flops is None and not rule.lower
            is_light &= not (own_biases and operator.name in bias_adds)
            fuses = (is_light and is_fused(op)) or (mode == "fused+loss" and op == _LOSS)
            own = _Place(operator.name, region if fuses else None)
            before = [made[name] for name in sources if name in made]
            own.depth = max((p.depth + (not own.fuses(p)) for p in before), default=0)
            made |= dict.fromkeys(operator.outputs, own)
            kernels[operator.name] = operator.name
            for place in before:
                if own.fuses(place) and own.depth == place.depth:
                    kernels[first(operator.name)] = first(place.name)
        sizes: dict[str, int] = {}
        for name in kernels:
            sizes[first(name)] = sizes.get(first(name), 0) + 1
        number = {name: k for k, name in enumerate(sizes)}
        numbers = {n: number[first(n)] for n in kernels if sizes[first(n)] > 1}
        lone = frozenset[str]() if own_biases else frozenset(bias_adds) - numbers.keys()
        return Kernels(numbers, roots, lone)


@dataclass
class _Place:
    """Where an operator is: the region in which it may fuse, if it may, and how many kernels are
    before its own on any path."""

    name: str
    region: int | None
    depth: int = 0

    def fuses(self, other: _Place) -> bool:
        return self.region is not None and self.region == other.region


def fused_traffic(
    program: Program, operators: Sequence[Operator], kernels: Kernels,
    types: Mapping[str, TensorType], saved: Mapping[str, Saved], mode: KernelMode = "compiled",
) -> dict[str, FusedTraffic]:  # fmt: skip
    """What the operators of kernels move in a program, which may be a stage of the whole."""
    made, crossing, kept = _needed(program, operators, kernels, saved)
    if mode != "compiled":
        return _remaking_traffic(operators, kernels, types, saved, (made, crossing))
    traffic = _Traffic(kernels, types, (made, crossing, kept))
    bare = _Traffic(kernels, types, (made, crossing, set()))
    by_kernel: dict[int, list[_Moves]] = {}
    for operator in operators:
        if operator.name in kernels.numbers:
            moves = _Moves(
                operator,
                traffic.of(operator, saved.get(operator.name)),
                bare.of(operator, None),
                any(name in kept - crossing for name in operator.outputs),
            )
            by_kernel.setdefault(kernels.numbers[operator.name], []).append(moves)
    return {
        moves.operator.name: found
        for kernel in by_kernel.values()
        for moves, found in zip(kernel, _kernel_traffic(kernel, types), strict=True)
    }


class _Moves(NamedTuple):
    """What an operator moves, and what it would move if nothing were kept; `keeps` a result that
    only backward reads."""

    operator: Operator
    usual: FusedTraffic
    bare: FusedTraffic
    keeps: bool


def _kernel_traffic(
    kernel: Sequence[_Moves], types: Mapping[str, TensorType]
) -> Iterator[FusedTraffic]:
    """The traffic of a kernel's operators, with that of running again."""
    rereads = any(moves.keeps for moves in kernel)
    more: list[list[float]] = []
    more_bytes = positive_bytes = 0.0
    for operator, usual, bare, _ in kernel:
        names, n_inputs = (*operator.inputs, *operator.outputs), len(operator.inputs)
        more.append([])
        for k, name in enumerate(names):
            runs = 2 + (rereads and k < n_inputs)
            saved = usual.forward[k] + usual.backward[k] - bare.backward[k]
            share = runs * bare.forward[k] - saved
            more[-1].append(max(share, 0.0))
            more_bytes += share * types[name].size_bytes
            positive_bytes += max(share, 0.0) * types[name].size_bytes
    scale = max(more_bytes, 0.0) / positive_bytes if positive_bytes else 0.0
    for moves, shares in zip(kernel, more, strict=True):
        forward, backward, _ = moves.usual.launches
        launches = forward, backward, forward if scale else 0
        yield replace(moves.usual, again=tuple(scale * x for x in shares), launches=launches)


def _needed(
    program: Program, operators: Sequence[Operator], kernels: Kernels, saved: Mapping[str, Saved]
) -> tuple[Mapping[str, int], set[str], set[str]]:
    """Value -> the kernel that makes it; which values are read elsewhere, and which are kept."""
    roots, numbers = kernels.roots, kernels.numbers
    made = {n: numbers[o.name] for o in operators if o.name in numbers for n in o.outputs}
    ends = program.loss, *program.outputs, *program.sent, *program.updates
    crossing, kept = {roots.get(n, n) for n in ends if n is not None}, set[str]()
    for operator in operators:
        of, own = saved.get(operator.name), numbers.get(operator.name, -1)
        if rule_for(str(operator.call.op)).view:
            continue
        names = [roots.get(name, name) for name in operator.inputs]
        crossing |= {name for name in names if made.get(name) != own}
        if of is not None:
            kept |= {names[i] for i in of.inputs} | {operator.outputs[i] for i in of.outputs}
    return made, crossing, kept


@dataclass
class _Traffic:
    """Counts what kernels move; `_left` has the bytes of a value that a kernel has yet to move."""

    kernels: Kernels
    types: Mapping[str, TensorType]
    needed: tuple[Mapping[str, int], set[str], set[str]]
    _left: dict[tuple[int, str, str], float] = field(default_factory=dict)
    _launched: set[tuple[int, str]] = field(default_factory=set)

    def of(self, operator: Operator, saved: Saved | None) -> FusedTraffic:
        made, crossing, kept = self.needed
        number = self.kernels.numbers[operator.name]
        forward, backward = list[float](), list[float]()
        has_grad = any(self.types[name].has_grad for name in operator.outputs)
        for i, name in enumerate(operator.inputs):
            is_own = made.get(self._root(name)) == number
            forward.append(0.0 if is_own else self.once(number, name, "value"))
            moved = 0.0
            if has_grad and self.types[name].has_grad and not is_own:
                moved += self.once(number, name, "gradient")
            if saved is not None and i in saved.inputs:
                moved += self.once(number, name, "kept")
            backward.append(moved)
        for i, name in enumerate(operator.outputs):
            forward.append(float(name in crossing or name in kept))
            moved = float(self.types[name].has_grad and name in crossing)
            if saved is not None and i in saved.outputs:
                moved += self.once(number, name, "kept")
            backward.append(moved)
        launches = self._launch(number, "forward"), has_grad and self._launch(number, "backward")
        counts = launches[0], int(launches[1]), launches[0]
        return FusedTraffic(tuple(forward), tuple(backward), tuple(forward), counts)

    def _root(self, name: str) -> str:
        return self.kernels.roots.get(name, name)

    def once(self, number: int, name: str, what: str) -> float:
        """How much of a value a kernel moves here, which has moved other views of it before."""
        root, size_bytes = self._root(name), float(self.types[name].size_bytes)
        left = self._left.get((number, root, what), float(self.types[root].size_bytes))
        share = min(1.0, left / size_bytes) if size_bytes else 0.0
        self._left[number, root, what] = left - share * size_bytes
        return share

    def _launch(self, number: int, phase: str) -> int:
        is_first = (number, phase) not in self._launched
        self._launched.add((number, phase))
        return int(is_first)


def _remaking_traffic(
    operators: Sequence[Operator], kernels: Kernels, types: Mapping[str, TensorType],
    saved: Mapping[str, Saved], needed: tuple[Mapping[str, int], set[str]],
) -> dict[str, FusedTraffic]:  # fmt: skip
    """What kernels move that keep nothing inside. Running again is their forward."""
    made, crossing = needed
    traffic = _Traffic(kernels, types, (made, crossing, set()))
    own = [operator for operator in operators if operator.name in kernels.numbers]
    read = _read_again(own, kernels, saved, needed)
    found = dict.fromkeys(kernels.lone_biases & {o.name for o in operators}, _IN_MATMUL)
    for operator in own:
        number, bare = kernels.numbers[operator.name], traffic.of(operator, None)
        backward = list(bare.backward)
        for i, name in enumerate((*operator.inputs, *operator.outputs)):
            root = kernels.roots.get(name, name)
            is_outside = i >= len(operator.inputs) or made.get(root) != number
            if is_outside and (number, root) in read:
                backward[i] += traffic.once(number, name, "kept")
        found[operator.name] = replace(bare, backward=tuple(backward))
    return found


def _read_again(
    operators: Sequence[Operator], kernels: Kernels, saved: Mapping[str, Saved],
    needed: tuple[Mapping[str, int], set[str]],
) -> set[tuple[int, str]]:  # fmt: skip
    """(kernel, value that it reads or writes) of those that backward makes kept values from."""
    made, crossing = needed
    makers = {name: operator for operator in operators for name in operator.outputs}
    seen = set[tuple[int, str]]()
    for operator in operators:
        if (of := saved.get(operator.name)) is None:
            continue
        names = [operator.inputs[i] for i in of.inputs] + [operator.outputs[i] for i in of.outputs]
        left, number = names, kernels.numbers[operator.name]
        while left:
            root = kernels.roots.get(name := left.pop(), name)
            if (number, root) not in seen:
                seen.add((number, root))
                if made.get(root) == number and root not in crossing:
                    left.extend(makers[root].inputs)
    return {(n, root) for n, root in seen if made.get(root) != n or root in crossing}

"""Verifies the types of gradients: shape, dtype and placement (`check_gradients`).

The gradient of a variable has the variable's shape. On every axis its placement follows:

    variable    R   P   I   S
    gradient    P   R   I   S     as values I and R are the same: one may be read as the other

    move        the gradient's is the transposed move, a row of the table, of a move of the stage;
                it keeps the dtype
    sum         both terms have the type of the sum
    operator    its backward reads gradients of its results, and what it makes itself
    handover    each gradient has the type of its variable, each position comes once, and every
                variable that the loss depends on has a gradient

An operator that does nothing on one rank, such as an expand to one row, passes a gradient on: then
its input's gradient is its result's, under that one's name and placement (`_Gradients.passed`).

Kernels between two gradients have no placement. Not proved: that they are the derivative, and which
of two variables of equal type a gradient is of. Kernels are recorded from autograd
(`passes/backward/recording.py`), and tests compare steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from autopar.placement import I, R, Spec, gradient_spec
from autopar.program.communication import used_parameters
from autopar.program.lines import (
    CallLine,
    FunctionBackward,
    FusedReductions,
    GatherLine,
    GradientMove,
    JointLine,
    JointProgram,
    KernelLine,
    Local,
    MoveLine,
    ReadyLine,
    StageProgram,
    StartLine,
    Variable,
    WaitLine,
    communications,
)
from autopar.verifier.joint_flow import Fault, error, place
from autopar.verifier.stage import check_move, folds_over

# Of a gradient: its shape, and where its values are.
Type = tuple[tuple[int, ...], Spec]


def check_gradients(joint: JointProgram) -> None:
    """Raise `VerificationError` unless every gradient has the type of what it is a gradient of."""
    checker = _Gradients(joint)
    for number, line in enumerate(joint.backward):
        try:
            checker.line(line)
        except Fault as fault:
            raise error(str(fault), place("backward", number, line)) from None
    checker.finish()


@dataclass
class _Gradients:
    """`known` are gradients by name; `makers` are the operators whose backward made them."""

    joint: JointProgram
    known: dict[str, Variable] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    # Moves that passed are not checked again: repeated blocks have equal ones.
    sound: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        stage = self.joint.stage
        self.types = stage.variables
        self.moves = _moves(stage)
        self.results = {
            line.key: tuple((out.shape, value_of_gradient(out.spec)) for out in line.outs)
            for line in stage.body
            if isinstance(line, CallLine)
        }
        self.taken = [self.types[name] for name in self.joint.taken]
        self._cotangents()

    def line(self, line: JointLine) -> None:
        """Raise `Fault` unless the gradients of a line have the right types."""
        match line:
            case KernelLine(is_forward=False, key=""):
                self._sum(line)
            case KernelLine(is_forward=False):
                self._kernel(line)
            case GradientMove() | FusedReductions() | StartLine() | WaitLine():
                for move in communications(line):
                    if isinstance(move, GradientMove) and not isinstance(line, WaitLine):
                        self._move(move)
                    if isinstance(move, GradientMove) and not isinstance(line, StartLine):
                        self.known[move.out.name] = move.out
            case FunctionBackward():
                self._function(line)
            case ReadyLine():
                self._ready(line)

    def finish(self) -> None:
        """Raise unless all variables that the loss depends on have got a gradient."""
        stage, used = self.joint.stage, used_parameters(self.joint.stage)
        for position, name in enumerate(self.joint.taken):
            if _is_trained(self.taken[position], name in used) and position not in self.ready:
                raise error(f"no gradient of {name} is handed over", f"backward of {stage.name}")

    def _cotangents(self) -> None:
        stage, given = self.joint.stage, self.joint.cotangents
        names = [*([stage.loss] if stage.loss else []), *(s.local.name for s in stage.sent)]
        if not stage.trains:
            if given or self.joint.backward or self.joint.saved:
                raise error("it does not train, but has a backward", stage.name)
            return
        if len(given) != len(names):
            raise error(f"{len(given)} gradients for {len(names)} results", "the cotangents")
        for name, gradient in zip(names, given, strict=True):
            local = self.types[name]
            if gradient is None:
                if _has_gradient(local):
                    raise error(f"{name} has no gradient", "the cotangents")
                continue
            spec = value_of_gradient(local.spec)
            self.known[gradient] = Variable(gradient, local.shape, local.dtype, spec)

    def _is(self, gradient: str, shape: tuple[int, ...], spec: Spec, of: str) -> None:
        """Raise `Fault` unless `gradient` has this shape, and values placed as `spec`."""
        found = self.known.get(gradient)
        if found is None:
            raise Fault(f"{gradient} is no gradient")
        if found.shape != shape:
            raise Fault(f"{gradient} is {list(found.shape)}, but {of} is {list(shape)}")
        if found.spec is None or _values(found.spec) == spec:
            return
        if not self._passes((shape, spec), (shape, _values(found.spec))):
            raise Fault(f"{gradient} is {found.spec}, but that of {of} is {spec}")

    def _passes(self, wanted: Type, given: Type) -> bool:
        """May a gradient of type `given` be one of type `wanted`, passed on by operators?"""
        found, new = {wanted}, [wanted]
        while new:
            for other in self.passed.get(new.pop(), ()):
                if other not in found:
                    found.add(other)
                    new.append(other)
        return given in found

    @cached_property
    def passed(self) -> dict[Type, set[Type]]:
        """Types of gradients -> what they are called if an operator passes on its result's.

        An operator has no kernel for that if it does nothing on one rank, such as an expand to one
        row. Then its input's gradient is its result's, under that one's name and placement.
        """
        made: dict[str, set[Type]] = {}
        for line in self.joint.backward:
            key = ""
            if isinstance(line, KernelLine) and not line.is_forward:
                key = line.key
            elif isinstance(line, FunctionBackward):
                key = line.call.key
            if key:
                assert isinstance(line, KernelLine | FunctionBackward)
                types = ((out.shape, _values(out.spec)) for out in line.outs if out.spec)
                made.setdefault(key, set()).update(types)
        found: dict[Type, set[Type]] = {}
        for call in self.joint.stage.body:
            for name in call.reads if isinstance(call, CallLine) else ():
                local = self.types.get(name)
                if local is None or not local.has_grad:
                    continue
                assert isinstance(call, CallLine)
                own = local.shape, value_of_gradient(local.spec)
                if own not in made.get(call.key, ()):
                    others = (o for o in call.outs if o.has_grad and o.shape == local.shape)
                    types = ((o.shape, value_of_gradient(o.spec)) for o in others)
                    found.setdefault(own, set()).update(types)
        return found

    def _sum(self, line: KernelLine) -> None:
        (total,) = line.outs
        assert total.spec is not None
        terms = line.reads
        if len(terms) != 2:
            raise Fault(f"it adds {len(terms)} gradients")
        for term in terms:
            self._is(term, total.shape, _values(total.spec), total.name)
        self.known[total.name] = total

    def _kernel(self, line: KernelLine) -> None:
        key, known, makers = line.key, self.known, self.makers
        for name in line.reads:
            found = known.get(name)
            if found is None or found.spec is None or makers.get(name) == key:
                continue
            wanted, given = self.results.get(key), (found.shape, _values(found.spec))
            if wanted is None or given in wanted:
                continue
            if not any(self._passes(result, given) for result in wanted):
                raise Fault(f"{name}, {list(found.shape)} {found.spec}, is of no result of {key}")
        for out in line.outs:
            known[out.name], makers[out.name] = out, key
        if line.target == "aten._to_copy.default" and line.outs[0].spec is None:
            source = known.get(line.reads[0])
            if source is not None and source.spec is not None:  # a cast moves nothing
                out = line.outs[0]
                known[out.name] = Variable(out.name, out.shape, out.dtype, source.spec)

    def _move(self, line: GradientMove) -> None:
        found = self.moves.get(id(line.move)) or next(
            (known for known in self.moves.values() if known[0] == line.move), None
        )
        if found is None:
            raise Fault(f"the stage has no {line.move.move.name} of {line.move.value} like it")
        _, before = found
        after = line.move.out
        self._is(line.source, after.shape, value_of_gradient(after.spec), after.name)
        if line.out.shape != before.shape:
            raise Fault(f"{line.out.name} is {list(line.out.shape)}, not {list(before.shape)}")
        self._transposed(line, before)
        source = self.known[line.source]
        if line.out.dtype != source.dtype:
            raise Fault(f"{line.out.name} is {line.out.dtype}, but it was {source.dtype}")

    def _transposed(self, line: GradientMove, before: Local) -> None:
        """Raise `Fault` unless the move of the gradient leads to its placement."""
        assert line.out.spec is not None
        move, after = line.move.move, line.move.out
        sizes = self.joint.stage.axis_sizes
        folds = [folds_over(local, move.axes, sizes) for local in (after, before)]
        key = before.dims, before.spec, move, after.spec, line.out.spec, *folds
        if key in self.sound:
            return
        wanted = gradient_spec(before.spec)
        if line.out.spec != wanted:
            raise Fault(f"{line.out.name} is {line.out.spec}, not {wanted}")
        given = gradient_spec(after.spec)
        reason = check_move(before.tensor, given, move.transposed, wanted, sizes, folds)
        if reason is not None:
            raise Fault(reason)
        self.sound.add(key)

    def _function(self, line: FunctionBackward) -> None:
        for out, gradient in zip(line.call.outs, line.gradients, strict=True):
            if gradient is not None:
                self._is(gradient, out.shape, value_of_gradient(out.spec), out.name)
        arguments = [self.types[name] for name in line.call.reads if name in self.types]
        if len(arguments) != len(line.outs):
            raise Fault(f"{len(line.outs)} gradients of {len(arguments)} arguments")
        for made, local, wanted in zip(line.outs, arguments, line.wanted, strict=True):
            if not wanted:
                continue
            self.known[made.name], self.makers[made.name] = made, line.call.key
            self._is(made.name, local.shape, value_of_gradient(local.spec), local.name)

    def _ready(self, line: ReadyLine) -> None:
        if line.position not in range(len(self.taken)):
            raise Fault(f"there are {len(self.taken)} variables to have a gradient")
        if line.position in self.ready:
            raise Fault(f"the gradient of {self.joint.taken[line.position]} is handed over twice")
        self.ready.add(line.position)
        local = self.taken[line.position]
        self._is(line.source, local.shape, value_of_gradient(local.spec), local.name)


def _is_trained(local: Local, is_used: bool) -> bool:
    return is_used and _has_gradient(local)


def _has_gradient(local: Local) -> bool:
    return local.has_grad and (local.dtype.is_floating_point or local.dtype.is_complex)


@lru_cache(maxsize=1 << 12)
def value_of_gradient(spec: Spec) -> Spec:
    """The same, with R for I: where the values of a gradient are."""
    return _values(gradient_spec(spec))


@lru_cache(maxsize=1 << 12)
def _values(spec: Spec) -> Spec:
    return Spec(tuple(R if p == I else p for p in spec.placements), spec.order)


def _moves(stage: StageProgram) -> dict[int, tuple[MoveLine, Local]]:
    """Every move that has a backward, by identity, with what it moves."""
    found: dict[int, tuple[MoveLine, Local]] = {}
    now = dict(stage.given_variables)
    for line in stage.body:
        if isinstance(line, MoveLine):
            found[id(line)] = line, now[line.source]
        elif isinstance(line, GatherLine):
            at = now[line.source]
            for move in line.moves:
                found[id(move)] = move, at
                at = move.out
        for out in line.outs:
            now[out.name] = out
    return found

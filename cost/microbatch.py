"""Live bytes of one microbatch, line by line: forward, then backward in reverse.

A storage is held by the variables that view it and by the operators that autograd keeps it
for; it is gone when nobody holds it. A gradient is made by the first consumer's backward,
added to by others, and gone after its producer's; a parameter's stays.

Between stages, a received tensor lives until its microbatch's backward is over, and so do what
was sent, the gradient that comes back for it, and the gradient that is sent back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.collective import regathered
from autopar.cost.ledger import Ledger
from autopar.moves import PrimitiveKind
from autopar.stage_program import (
    UNUSED,
    CallLine,
    FreeLine,
    GatherLine,
    Line,
    Local,
    MoveLine,
    StageProgram,
    outs,
    reads,
    storage_owners,
)

ACTIVATIONS, GRADIENTS = "activations", "activation gradients"


@dataclass
class _Holders:
    """Storages of one kind with how many hold them."""

    ledger: Ledger
    kind: str
    counts: dict[str, int] = field(default_factory=dict)

    def make(self, owner: str, size_bytes: float) -> None:
        self.ledger.add(self.kind, owner, size_bytes)
        self.counts[owner] = 0

    def hold(self, owner: str) -> None:
        if owner in self.counts:
            self.counts[owner] += 1

    def release(self, owner: str) -> None:
        if owner not in self.counts:
            return
        self.counts[owner] -= 1
        if self.counts[owner] <= 0:
            del self.counts[owner]
            self.ledger.drop(self.kind, owner)


class MicrobatchMemory:
    """Plays the body of a program on a ledger.

    What depends on the lines alone is found once; `forward` and `backward` may be played
    any number of times. Gradients of parameters are left in the ledger under "gradients"
    (of stored tensors) and "gradients of uses".
    """

    def __init__(self, program: StageProgram, ledger: Ledger) -> None:
        self.program, self.ledger = program, ledger
        self.owners = [
            # Only what the line touches: a map of all variables per line would be quadratic.
            {n: owner[n] for n in (*reads(line), *(o.name for o in outs(line))) if n in owner}
            for line, owner in zip(program.body, storage_owners(program.body), strict=True)
        ]
        self.reached, self.again = program.differentiated, regathered(program.body)
        self.gathered = {
            self.owners[i][line.out.name]
            for i, line in enumerate(program.body)
            if isinstance(line, GatherLine)
        }
        self.inputs = self._inputs()
        self.leaves = self._leaves()
        self.storages = _Holders(ledger, ACTIVATIONS)
        self.gradients = _Holders(ledger, GRADIENTS)
        self.kept: dict[int, list[str]] = {}
        self.gradient_of: dict[str, str] = {}

    def _inputs(self) -> list[dict[str, Local]]:
        """What each line reads, as it is then: a reshard's variable changes its type."""
        known = {d.local.name: d.local for d in self.program.delivered}
        known.update((b.local.name, b.local) for b in self.program.received)
        for parameter in self.program.parameters:
            known[parameter.stored.name] = parameter.stored
            known.update((use.local.name, use.local) for use in parameter.uses)
        found = []
        for line in self.program.body:
            found.append({name: known[name] for name in reads(line) if name in known})
            known.update((out.name, out) for out in outs(line))
        return found

    def _leaves(self) -> dict[str, tuple[str, str, float]]:
        """Variable of a parameter -> the kind and name its gradient is kept under, and bytes."""
        leaves: dict[str, tuple[str, str, float]] = {}
        for p in self.program.parameters:
            leaves[p.stored.name] = ("gradients", p.name, p.stored.size_bytes)
            for use in p.uses:
                if use.moves:
                    kept = ("gradients of uses", use.local.name, float(use.local.size_bytes))
                    leaves[use.local.name] = kept
        return leaves

    # -- forward ---------------------------------------------------------------------------------

    def forward(self) -> None:
        """Every line in order; afterwards only what autograd keeps, the loss, and what was
        received and sent are held."""
        variables: dict[str, str] = {}
        for boundary in self.program.received:
            self.storages.make(boundary.local.name, boundary.local.size_bytes)
            self.storages.hold(boundary.local.name)
        for i, line in enumerate(self.program.body):
            if isinstance(line, FreeLine):
                for name in line.names:
                    self.storages.release(variables.pop(name))
                continue
            self._write(i, line, variables)
            self.ledger.mark(_text(line), self._forward_workspace(line))
            self._keep(i, line)
        held = {b.local.name for b in self.program.sent if b.local.has_grad}
        for name, owner in variables.items():
            if name != self.program.loss and name not in held:
                self.storages.release(owner)

    def _write(self, i: int, line: Line, variables: dict[str, str]) -> None:
        for position, out in enumerate(outs(line)):
            owner = self.owners[i].get(out.name, out.name)
            if out.name == UNUSED:
                if isinstance(line, CallLine) and line.shares and line.shares[position]:
                    continue
                owner = f"{UNUSED}{position}@{i}"
            if owner.endswith(f"@{i}"):
                self.storages.make(owner, out.size_bytes)
            self.storages.hold(owner)
            if out.name in variables:
                self.storages.release(variables[out.name])
            variables[out.name] = owner

    def _keep(self, i: int, line: Line) -> None:
        if not isinstance(line, CallLine) or not line.has_grad:
            return
        kept = [self.owners[i].get(name, name) for name in line.keeps]
        self.kept[i] = [owner for owner in kept if owner not in self.gathered]
        for owner in self.kept[i]:
            self.storages.hold(owner)
        if line.saved_bytes:
            self.ledger.add(ACTIVATIONS, f"saved@{i}", line.saved_bytes)

    def _forward_workspace(self, line: Line) -> float:
        match line:
            case CallLine():
                # What is kept besides results is made now, and held from here on.
                return line.workspace.forward_bytes + (line.saved_bytes if line.has_grad else 0.0)
            case MoveLine():
                return _primitive_bytes(line, line.move.forward, line.forward_bytes)
            case GatherLine():
                return self._gather_bytes(line)
        return 0.0

    @staticmethod
    def _gather_bytes(line: GatherLine) -> float:
        """Buffers of gathering, and the tensors between its moves."""
        needed = 0.0
        for n, move in enumerate(line.moves):
            between = float(move.out.size_bytes) if n + 1 < len(line.moves) else 0.0
            own = _primitive_bytes(move, move.move.forward, move.forward_bytes)
            needed = max(needed, own + between)
        return needed

    # -- backward --------------------------------------------------------------------------------

    def backward(self) -> None:
        """The differentiated lines in reverse; the rest of what was kept goes with the graph."""
        loss = self.program.loss
        if loss is not None and self.reached:
            self._give(loss, "seed", self._loss_bytes(loss))
        for boundary in self.program.sent:
            if boundary.local.has_grad:
                owner = f"{boundary.local.name}@received"
                self._give(boundary.local.name, owner, boundary.local.size_bytes)
                self.gradients.hold(owner)  # the executor holds it until backward is over
        for i in sorted(self.reached, reverse=True):
            line = self.program.body[i]
            if isinstance(line, CallLine):
                self._call_backward(i, line)
            elif isinstance(line, MoveLine):
                self._move_backward(i, line)
            elif isinstance(line, GatherLine):
                self._gather_backward(line)
        self.forget()

    def forget(self) -> None:
        """Let go of the microbatch."""
        for kind in (ACTIVATIONS, GRADIENTS):
            self.ledger.clear(kind)
        self.storages.counts.clear()
        self.gradients.counts.clear()
        self.gradient_of.clear()
        self.kept.clear()

    def _loss_bytes(self, loss: str) -> float:
        made = (out for line in self.program.body for out in outs(line) if out.name == loss)
        return float(next(made).size_bytes)

    def _give(self, name: str, owner: str, size_bytes: float) -> None:
        """`name` gets a new gradient."""
        self.gradients.make(owner, size_bytes)
        self.gradients.hold(owner)
        self.gradient_of[name] = owner

    def _call_backward(self, i: int, line: CallLine) -> None:
        taken = [
            self.gradient_of.pop(out.name) for out in line.outs if out.name in self.gradient_of
        ]
        for gather in self.again.get(i, ()):
            self.ledger.add(ACTIVATIONS, f"again@{i}", gather.out.size_bytes)
            self.ledger.mark(f"gathering {gather.parameter} again", self._gather_bytes(gather))
        made: list[tuple[str, str]] = []
        for name, local in self.inputs[i].items():
            if not local.has_grad:
                continue
            if name in line.workspace.passed and taken and name not in self.leaves:
                self.gradients.hold(taken[0])
                made.append((name, taken[0]))
            else:
                owner = f"{name}@{i}"
                self.gradients.make(owner, local.size_bytes)
                self.gradients.hold(owner)
                made.append((name, owner))
        self.ledger.mark(f"backward of {_text(line)}", line.workspace.backward_bytes)
        self.ledger.drop(ACTIVATIONS, f"saved@{i}")
        self.ledger.drop(ACTIVATIONS, f"again@{i}")
        for owner in self.kept.pop(i, ()):
            self.storages.release(owner)
        for owner in taken:
            self.gradients.release(owner)
        for name, owner in made:
            self._arrive(name, owner)

    def _move_backward(self, i: int, line: MoveLine) -> None:
        taken = self.gradient_of.pop(line.out.name)
        local = self.inputs[i][line.source]
        if line.move.backward == "identity":
            self.gradients.hold(taken)
            owner = taken
        else:
            owner = f"{line.source}@{i}"
            self.gradients.make(owner, local.size_bytes)
            self.gradients.hold(owner)
        needed = _primitive_bytes(line, line.move.backward, line.backward_bytes)
        self.ledger.mark(f"backward of {_text(line)}", needed)
        self.gradients.release(taken)
        self._arrive(line.source, owner)

    def _gather_backward(self, line: GatherLine) -> None:
        taken = self.gradient_of.pop(line.out.name)
        owner = f"{line.source}@gathered"
        self.gradients.make(owner, self.leaves[line.source][2])
        self.gradients.hold(owner)
        needed = max(_primitive_bytes(m, m.move.backward, m.backward_bytes) for m in line.moves)
        self.ledger.mark(f"backward of {_text(line)}", needed)
        self.gradients.release(taken)
        self._arrive(line.source, owner)

    def _arrive(self, name: str, owner: str) -> None:
        """A gradient of `name`: the first is kept, later ones are added to it."""
        if name in self.leaves:
            kind, kept_as, size_bytes = self.leaves[name]
            self.gradients.release(owner)
            if not self.ledger.has(kind, kept_as):
                self.ledger.add(kind, kept_as, size_bytes)
            return
        before = self.gradient_of.get(name)
        if before is None:
            self.gradient_of[name] = owner
            return
        if self.gradients.counts.get(before, 0) > 1:
            # The first one belongs to another tensor too, so the sum is a new one.
            total = f"{owner}+"
            self.gradients.make(total, self.ledger.held[GRADIENTS][owner])
            self.gradients.hold(total)
            self.ledger.mark(f"adding gradients of {name}")
            self.gradients.release(before)
            self.gradient_of[name] = total
        self.gradients.release(owner)


def _primitive_bytes(line: MoveLine, kind: PrimitiveKind, size_bytes: int) -> float:
    """Buffers of a primitive besides its result; rows are cut and joined without a copy."""
    rows = all(s.dim == 0 and s.outer == 1 for s in line.move.splits)
    match kind:
        case "all_gather" | "reduce_scatter":
            return 0.0 if rows else float(size_bytes)
        case "all_to_all":
            return 2.0 * size_bytes
        case _:
            return 0.0


def _text(line: Line) -> str:
    match line:
        case CallLine():
            return line.key
        case GatherLine():
            return f"gathering {line.parameter}"
        case MoveLine():
            return f"{line.move.name} of {line.value}"
        case _:
            return ", ".join(out.name for out in outs(line))

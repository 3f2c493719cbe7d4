"""Live bytes of one microbatch, line by line: forward, then backward in reverse.

Storages: the variables that view a storage hold it, and so do the operators that autograd keeps it
for. It is freed when nothing holds it.

Gradients: the first consumer's backward makes the gradient of a variable, and the backwards of
other consumers add to it. It is freed after the producer's backward. A parameter's gradient stays.

Recomputed segments: in forward, autograd holds only the segment's inputs and the results of its
lines at `Segment.kept`, such as matmuls and collectives. Before the backward of the segment's last
line, its lines run again. The storages that they make then are new ones, held as autograd holds
those of other lines, gathered parameters included. An input is released after the last line that
reads it again.

Between stages: sent tensors, which may be under way, and gradients to be sent back live until the
backward of their microbatch is over.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from autopar.cost.memory.gathering import Call, Gathering, primitive_bytes
from autopar.cost.memory.ledger import Ledger, LedgerState
from autopar.cost.memory.line_facts import LineFacts
from autopar.program import (
    UNUSED,
    CallLine,
    FreeLine,
    GatherLine,
    Line,
    MoveLine,
    Segment,
    StageProgram,
    gathers_at,
)

ACTIVATIONS, GRADIENTS = "activations", "activation gradients"


@dataclass
class _Holders:
    """Storages of one kind, with the number of holders of each."""

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
    """Simulates the body of a program on a ledger.

    `forward` and `backward` may be called any number of times; what depends on the lines alone is
    computed once, here. Gradients of parameters stay in the ledger, under "gradients" (of stored
    tensors) and "gradients of uses".
    """

    def __init__(self, program: StageProgram, ledger: Ledger) -> None:
        self.program, self.ledger, self.facts = program, ledger, LineFacts(program)
        self.gathering = Gathering(program, ledger)
        self.before: LedgerState | None = None
        self.storages = _Holders(ledger, ACTIVATIONS)
        self.gradients = _Holders(ledger, GRADIENTS)
        self.kept: dict[int, list[str]] = {}
        self.segment_kept: dict[int, list[str]] = {}
        self.gradient_of: dict[str, str] = {}

    def _begin(self, end: tuple[bool, bool, int] | None) -> None:
        """Start a block before the first line of a repeat."""
        if end is not None and end[0]:
            self.before = self.ledger.before_block()

    def _finish(self, end: tuple[bool, bool, int] | None) -> None:
        """End the block after the last line of a repeat."""
        if end is not None and end[1] and self.before is not None:
            self.ledger.repeat(self.before, end[2], ("gradients", "gradients of uses"))
            self.before = None

    def forward(self) -> None:
        """Run every line in order.

        Afterwards what is saved, the loss and sent tensors are held.
        """
        variables: dict[str, str] = {}
        self._begin_gathers(("forward", -1))
        for boundary in self.program.received:
            self.storages.make(boundary.local.name, boundary.local.size_bytes)
            self.storages.hold(boundary.local.name)
        for i, line in enumerate(self.program.body):
            end = self.facts.forward_ends.get(i)
            self._begin(end)
            self._line_forward(i, line, variables)
            self._finish(end)
        for boundary in self.program.received:
            self.storages.release(boundary.local.name)
        held = {b.local.name for b in self.program.sent if b.local.has_grad}
        for name, owner in variables.items():
            if name != self.program.loss and name not in held:
                self.storages.release(owner)

    def _line_forward(self, i: int, line: Line, variables: dict[str, str]) -> None:
        segment = self.facts.segments.get(i)
        if segment is not None and i == segment.start:
            self._hold_inputs(segment, variables)
        if isinstance(line, FreeLine):
            for name in line.names:
                self.storages.release(variables.pop(name))
            return
        if isinstance(line, GatherLine):
            if self.facts.runs[i][0] == i:
                self._gather(i, variables)
            return
        self._write(i, line, variables)
        self.ledger.mark(_text(line), self._forward_workspace(line))
        if segment is None:
            self._keep(i, line)
        elif i in segment.kept:
            self._keep_results(i, line)

    def _gather(self, i: int, variables: dict[str, str], again: bool = False) -> None:
        """Gather the run that begins at line `i`."""
        lines = gathers_at(self.program, self.facts.runs[i])
        at = {line.out.name: k for line, k in zip(lines, self.facts.runs[i], strict=True)}
        following = self.facts.next_run.get(("again" if again else "forward", i), ())
        self.gathering.arrive(
            lines, lambda line: self._write(at[line.out.name], line, variables, again), following
        )

    def _begin_gathers(self, place: tuple[str, int]) -> None:
        self.gathering.arrive((), lambda line: None, self.facts.next_run.get(place, ()))

    def _gather_anew(self, i: int) -> None:
        """Gather what backward needs from line `i` on, for as long as it reads that."""
        runs = self.facts.anew.get(i, ())
        for n, run in enumerate(runs, start=1):
            following = self.facts.next_run.get(("anew", i), ()) if n == len(runs) else ()
            self.gathering.arrive(
                run,
                lambda line: self.ledger.add(
                    ACTIVATIONS, f"{line.out.name} anew", line.out.size_bytes
                ),
                following,
            )

    def _hold_inputs(self, segment: Segment, variables: dict[str, str]) -> None:
        """Hold the inputs that the recomputation reads; gathered parameters are gathered again."""
        owners = [variables.get(name, name) for name in segment.inputs]
        held = [owner for owner in owners if owner not in self.facts.gathered]
        self.segment_kept[segment.start] = held
        for owner in held:
            self.storages.hold(owner)

    def _keep_results(self, i: int, line: Line) -> None:
        """Hold the results of a line that does not run again with its segment.

        Of its other saved bytes only attention's are held: those of a matmul are copies of its
        inputs, which are made again.
        """
        self.kept[i] = [self.facts.owners[i][out.name] for out in line.outs if out.name != UNUSED]
        for owner in self.kept[i]:
            self.storages.hold(owner)
        if isinstance(line, CallLine) and line.has_grad and line.is_attention:
            self.ledger.add(ACTIVATIONS, f"saved@{i}", line.saved_bytes)

    def _write(self, i: int, line: Line, variables: dict[str, str], again: bool = False) -> None:
        for position, out in enumerate(line.outs):
            owner = self.facts.owners[i].get(out.name, out.name)
            if out.name == UNUSED:
                if isinstance(line, CallLine) and line.shares and line.shares[position]:
                    continue
                owner = f"{UNUSED}{position}@{i}"
            is_made = owner.endswith(f"@{i}")
            if again:
                owner = self._owner_again(i, owner)
            if is_made:
                self.storages.make(owner, out.size_bytes)
            self.storages.hold(owner)
            if out.name in variables:
                self.storages.release(variables[out.name])
            variables[out.name] = owner

    def _owner_again(self, i: int, owner: str) -> str:
        """The name of a storage when its segment runs again: a new one if the segment makes it."""
        return (
            f"{owner} again" if owner in self.facts.remade[self.facts.segments[i].start] else owner
        )

    def _keep(self, i: int, line: Line, again: bool = False) -> None:
        if not isinstance(line, CallLine) or not line.has_grad:
            return
        kept = [self.facts.owners[i].get(name, name) for name in line.keeps]
        if again:
            self.kept[i] = [self._owner_again(i, owner) for owner in kept]
        else:
            self.kept[i] = [owner for owner in kept if owner not in self.facts.gathered]
        for owner in self.kept[i]:
            self.storages.hold(owner)
        if line.saved_bytes:
            self.ledger.add(ACTIVATIONS, f"saved@{i}", line.saved_bytes)

    def _forward_workspace(self, line: Line) -> float:
        match line:
            case CallLine():
                # Saved bytes other than results are made during this line, and then held.
                return line.workspace.forward_bytes + (line.saved_bytes if line.has_grad else 0.0)
            case MoveLine():
                return primitive_bytes(line, line.move.forward, line.forward_bytes)
        return 0.0

    def backward(self) -> None:
        """Run the differentiated lines in reverse, then free the rest with the graph."""
        loss = self.program.loss
        if loss is not None and self.facts.reached:
            made = (out for line in self.program.body for out in line.outs if out.name == loss)
            self._give(loss, "seed", float(next(made).size_bytes))
        for boundary in self.program.sent:
            if boundary.local.has_grad:
                owner = f"{boundary.local.name}@received"
                self._give(boundary.local.name, owner, boundary.local.size_bytes)
        self._begin_gathers(("anew", -1))
        for i in self.facts.backward_order:
            end = self.facts.backward_ends.get(i)
            self._begin(end)
            self._line_backward(i, self.program.body[i])
            self._finish(end)
        self.gathering.wait(self._reduced)
        self.forget()

    def _line_backward(self, i: int, line: Line) -> None:
        self._gather_anew(i)
        if i in self.facts.again:
            self._run_again(self.facts.segments[i])
        if isinstance(line, CallLine):
            self._call_backward(i, line)
        elif isinstance(line, MoveLine):
            self._move_backward(i, line)
        elif i in self.facts.reduced:
            self._reduce(i)
        for name in self.facts.last_reads.get(i, ()):
            self.ledger.drop(ACTIVATIONS, f"{name} anew")

    def _run_again(self, segment: Segment) -> None:
        """Run the segment's lines again; afterwards what autograd keeps of them is held."""
        variables: dict[str, str] = {}
        inputs = self.segment_kept.pop(segment.start)
        waiting = Counter(
            self.facts.owners[i].get(name, name)
            for i in self.facts.again[segment.last]
            for name in self.program.body[i].reads
        )
        for i in range(segment.start, segment.last + 1):
            line = self.program.body[i]
            if isinstance(line, FreeLine):
                for name in line.names:
                    self.storages.release(variables.pop(name))
                continue
            if i in segment.kept:
                self._hand_out(i, line, variables)
                continue
            if i in segment.handed_on:
                self._write(i, line, variables, again=True)
            elif isinstance(line, GatherLine):
                if i in segment.rerun_range and self.facts.runs[i][0] == i:
                    self._gather(i, variables, again=True)
            elif i in segment.rerun_range:
                self._write(i, line, variables, again=True)
                self.ledger.mark(f"{_text(line)} again", self._forward_workspace(line))
            self._keep(i, line, again=True)
            if i in segment.rerun_range:
                waiting.subtract(self.facts.owners[i].get(name, name) for name in line.reads)
                ended = [owner for owner in inputs if waiting[owner] <= 0]
                inputs = [owner for owner in inputs if waiting[owner] > 0]
                for owner in ended:
                    self.storages.release(owner)
        for owner in (*variables.values(), *inputs):
            self.storages.release(owner)

    def _hand_out(self, i: int, line: Line, variables: dict[str, str]) -> None:
        """Turn the kept results of a line into its results again, held as autograd holds them."""
        waiting = self.kept.pop(i)
        self.ledger.drop(ACTIVATIONS, f"saved@{i}")
        self._write_known(i, line, variables)
        self._keep(i, line, again=True)
        for owner in waiting:
            self.storages.release(owner)

    def _write_known(self, i: int, line: Line, variables: dict[str, str]) -> None:
        for out in line.outs:
            if out.name != UNUSED:
                owner = self.facts.owners[i][out.name]
                self.storages.hold(owner)
                if out.name in variables:
                    self.storages.release(variables[out.name])
                variables[out.name] = owner

    def forget(self) -> None:
        """Free everything of the microbatch but the gradients of parameters."""
        for kind in (ACTIVATIONS, GRADIENTS):
            self.ledger.clear(kind)
        self.gathering.forget()
        self.storages.counts.clear()
        self.gradients.counts.clear()
        self.gradient_of.clear()
        self.kept.clear()
        self.segment_kept.clear()

    def _give(self, name: str, owner: str, size_bytes: float) -> None:
        """Make the first gradient of `name`."""
        self.gradients.make(owner, size_bytes)
        self.gradients.hold(owner)
        self.gradient_of[name] = owner

    def _call_backward(self, i: int, line: CallLine) -> None:
        taken = [
            self.gradient_of.pop(out.name) for out in line.outs if out.name in self.gradient_of
        ]
        made: list[tuple[str, str]] = []
        for name, local in self.facts.inputs[i].items():
            if not local.has_grad:
                continue
            if name in line.workspace.passed and taken and name not in self.facts.leaves:
                self.gradients.hold(taken[0])
                made.append((name, taken[0]))
            else:
                owner = f"{name}@{i}"
                self.gradients.make(owner, local.size_bytes)
                self.gradients.hold(owner)
                made.append((name, owner))
        self.ledger.mark(f"backward of {_text(line)}", line.workspace.backward_bytes)
        self.ledger.drop(ACTIVATIONS, f"saved@{i}")
        for owner in self.kept.pop(i, ()):
            self.storages.release(owner)
        for owner in taken:
            self.gradients.release(owner)
        for name, owner in made:
            self._arrive(name, owner)

    def _move_backward(self, i: int, line: MoveLine) -> None:
        taken = self.gradient_of.pop(line.out.name)
        local = self.facts.inputs[i][line.source]
        if line.move.backward == "identity":
            self.gradients.hold(taken)
            owner = taken
        else:
            owner = f"{line.source}@{i}"
            self.gradients.make(owner, local.size_bytes)
            self.gradients.hold(owner)
        needed = primitive_bytes(line, line.move.backward, line.backward_bytes)
        self.ledger.mark(f"backward of {_text(line)}", needed)
        self.gradients.release(taken)
        self._arrive(line.source, owner)

    def _reduce(self, i: int) -> None:
        """Begin to reduce the gradients of the run whose last one is at line `i`."""
        lines = gathers_at(self.program, self.facts.reduced[i])
        self.gathering.reduce(
            [line for line in reversed(lines) if line.out.name in self.gradient_of],
            lambda line: self.gradients.release(self.gradient_of.pop(line.out.name)),
            self._reduce_alone,
            self._reduced,
        )

    def _reduce_alone(self, line: GatherLine) -> None:
        taken = self.gradient_of.pop(line.out.name)
        owner = f"{line.source}@gathered"
        self.gradients.make(owner, self.facts.leaves[line.source][2])
        self.gradients.hold(owner)
        needed = max(primitive_bytes(m, m.move.backward, m.backward_bytes) for m in line.moves)
        self.ledger.mark(f"backward of {_text(line)}", needed)
        self.gradients.release(taken)
        self._arrive(line.source, owner)

    def _reduced(self, call: Call) -> None:
        """Keep the results of a reduction; those of a fused one are views, so they are copied."""
        if len(call) > 1:
            buffer_bytes = sum(self.facts.leaves[line.source][2] for line in call)
            self.ledger.add(GRADIENTS, "reduced", buffer_bytes)
        for line in call:
            owner = f"{line.source}@gathered"
            self.gradients.make(owner, self.facts.leaves[line.source][2] if len(call) == 1 else 0.0)
            self.gradients.hold(owner)
            self._arrive(line.source, owner)
        self.ledger.mark("copying reduced gradients")
        self.ledger.drop(GRADIENTS, "reduced")

    def _arrive(self, name: str, owner: str) -> None:
        """Keep the first gradient of `name`; add later ones to it."""
        if name in self.facts.leaves:
            kind, kept_as, size_bytes = self.facts.leaves[name]
            is_same = self.ledger.held[GRADIENTS].get(owner) == size_bytes
            if is_same:  # the first one is kept as it is; one of another dtype is cast
                self.gradients.release(owner)
            if not self.ledger.has(kind, kept_as):
                self.ledger.add(kind, kept_as, size_bytes)
            if not is_same:
                self.ledger.mark(f"casting the gradient of {name}")
                self.gradients.release(owner)
            return
        before = self.gradient_of.get(name)
        if before is None:
            self.gradient_of[name] = owner
            return
        if self.gradients.counts.get(before, 0) > 1:
            # The first gradient is also that of another tensor, so the sum is a new tensor.
            # One gradient may be summed up for several tensors: so it is named after its own.
            total = f"{name}+"
            while self.ledger.has(GRADIENTS, total):
                total += "+"
            self.gradients.make(total, self.ledger.held[GRADIENTS][owner])
            self.gradients.hold(total)
            self.ledger.mark(f"adding gradients of {name}")
            self.gradients.release(before)
            self.gradient_of[name] = total
        self.gradients.release(owner)


def _text(line: Line) -> str:
    match line:
        case CallLine():
            return line.key
        case GatherLine():
            return f"gathering {line.parameter}"
        case MoveLine():
            return f"{line.move.name} of {line.value}"
        case _:
            return ", ".join(out.name for out in line.outs)

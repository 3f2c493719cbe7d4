"""What the memory of a microbatch needs to know of a program's lines, found once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.program import (
    GatherLine,
    Local,
    StageProgram,
    gathers_at,
    kept_gathers,
    reduced_runs,
    regathered,
    rerun,
    runs_of,
    storage_owners,
)


class LineFacts:
    """Storages, inputs, gradients and runs of gathers, line by line.

    owners           per line, the storages of the variables that it touches
    reached          positions of the lines that have a backward
    anew, again      gathers before a line's backward, and lines that run again before it
    remade           first line of a segment -> storages that it makes again
    gathered         storages of gathered parameters that backward gathers anew
    inputs           per line, the locals that it reads
    leaves           variable of a parameter -> its gradient's kind and owner in the ledger, bytes
    runs, next_run   runs of gathers, and which one begins when another is there
    reduced          runs of those that have gradients, by their last position
    """

    def __init__(self, program: StageProgram) -> None:
        self.program = program
        self.owners = [
            # Only variables that the line touches: all of them per line would be quadratic.
            {n: owner[n] for n in (*line.reads, *[o.name for o in line.outs]) if n in owner}
            for line, owner in zip(program.body, storage_owners(program.body), strict=True)
        ]
        self.reached, self.anew = program.differentiated, regathered(program)
        self.backward_order = sorted(self.reached, reverse=True)
        self.runs, self.reduced = runs_of(program), reduced_runs(program)
        self.segments = {i: s for s in program.segments for i in range(s.start, s.stop)}
        self.again = rerun(program)
        # First line of a segment -> owners of the storages that it makes again. `_owner_again`
        # gives the new storages names of their own.
        self.remade = {
            s.start: {
                self.owners[i][out.name]
                for i in (*self.again[s.last], *s.handed_on)
                for out in program.body[i].outs
                if self.owners[i].get(out.name, "").endswith(f"@{i}")
            }
            for s in program.segments
        }
        kept = kept_gathers(program)
        self.gathered = {
            self.owners[i][line.out.name]
            for i, line in enumerate(program.body)
            if isinstance(line, GatherLine) and line.out.name not in kept
        }
        self.next_run = self._next_runs()
        self.last_reads = self._last_reads()
        every = range(len(program.body))
        self.forward_ends = self._ends_of_repeats(every)
        self.backward_ends = self._ends_of_repeats(self.backward_order)
        self.inputs = self._inputs()
        self.leaves = self._leaves()

    def _inputs(self) -> list[dict[str, Local]]:
        """The locals that each line reads, as they are at that line: reshards change a variable."""
        known = {d.local.name: d.local for d in self.program.delivered}
        known.update((b.local.name, b.local) for b in self.program.received)
        for parameter in self.program.parameters:
            known[parameter.shard.name] = parameter.shard
            known.update((use.local.name, use.local) for use in parameter.uses)
        found = []
        for line in self.program.body:
            found.append({name: known[name] for name in line.reads if name in known})
            known.update((out.name, out) for out in line.outs)
        return found

    def _leaves(self) -> dict[str, tuple[str, str, float]]:
        """Variable of a parameter -> its gradient's kind and owner in the ledger, and its bytes."""
        leaves: dict[str, tuple[str, str, float]] = {}
        for p in self.program.parameters:
            leaves[p.shard.name] = ("gradients", p.name, p.stored.size_bytes)
            for use in p.uses:
                if use.moves:
                    kept = ("gradients of uses", use.local.name, float(use.local.gradient_bytes))
                    leaves[use.local.name] = kept
        return leaves

    def _next_runs(self) -> dict[tuple[str, int], Sequence[GatherLine]]:
        """Where a run is gathered -> the one that begins when it is there.

        Places are ("forward", "anew" or "again", position); position -1 of "forward" and "anew" is
        the beginning. A run right after another one is not begun early.
        """
        found: dict[tuple[str, int], Sequence[GatherLine]] = {}
        runs = [run for i, run in self.runs.items() if run[0] == i]
        if runs and runs[0][0] > 0:
            found["forward", -1] = gathers_at(self.program, runs[0])
        for run, following in itertools.pairwise(runs):
            found["forward", run[0]] = gathers_at(self.program, following)
        before = "anew", -1
        for i in self.backward_order:
            anew = self.anew.get(i, ())
            if anew:
                if i != self.backward_order[0]:
                    found[before] = anew[0]
                before = "anew", i
            again = [k for k in self.again.get(i, ()) if k in self.runs and self.runs[k][0] == k]
            for k in again:
                is_beside = bool(anew) and k == self.again[i][0]
                if not is_beside:
                    found[before] = gathers_at(self.program, self.runs[k])
                before = "again", k
        return found

    def _last_reads(self) -> dict[int, list[str]]:
        """Position of a line -> variables gathered anew that no backward after its own reads."""
        anew = {line.out.name for runs in self.anew.values() for run in runs for line in run}
        first: dict[str, int] = {}
        for i in self.backward_order:
            owners = self.owners[i].values()
            read = {owner.rpartition("@")[0] for owner in owners if owner in self.gathered}
            first |= dict.fromkeys(read & anew, i)
        found: dict[int, list[str]] = {}
        for name, i in first.items():
            found.setdefault(i, []).append(name)
        return found

    def _ends_of_repeats(self, order: Sequence[int]) -> dict[int, tuple[bool, bool, int]]:
        """First and last lines of a repeat, in the order of simulation -> (first, last, blocks)."""
        ends: dict[int, tuple[bool, bool, int]] = {}
        for repeat in self.program.repeats:
            lines = [i for i in order if repeat.start <= i < repeat.stop]
            for i in (lines[0], lines[-1]) if lines else ():
                ends[i] = (i == lines[0], i == lines[-1], repeat.count)
        return ends

"""When lines of a recomputed segment run again: each before the first backward that needs it.

    before    all lines of the segment, backward of its last line, ..., backward of its first line
    after     what the last line's backward needs, backward of the last line, what ...

So few results are there at once, and a compiler sees them beside what reads them. The backward of
an operator needs what the operator keeps (`CallLine.keeps`). It needs the operator itself if that
saves more, as the statistics of a norm, or whatever a function keeps. Of a matmul that is copies of
its inputs, which backward makes itself, before the matmul would run.
Gathers of parameters begin with the first line that runs again, because compute hides them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.caching import once
from autopar.operators import function_of
from autopar.program.communication.backwards import Backward, backwards
from autopar.program.lines import CallLine, GatherLine, Line, StageProgram


@once
def reruns(program: StageProgram) -> dict[Backward, tuple[int, ...]]:
    """The backward of an operator, or a part -> positions of the lines that run again before it."""
    found: dict[Backward, tuple[int, ...]] = {}
    for segment in program.segments:
        positions = range(segment.start, segment.stop)
        waiting = {*segment.again}
        first = {k for k in waiting if isinstance(program.body[k], GatherLine)}
        for order in filter(None, backwards(program, positions)):
            needs = _needs_of(program.body, positions, order)
            for work in order:
                wanted = needs.reruns(work.position, waiting)
                if wanted:
                    wanted |= first & waiting
                    waiting -= wanted
                    found[work] = tuple(sorted(wanted))
    return found


@dataclass(frozen=True)
class Step:
    """An operator or reshard, by names of values. Its backward reads those in `kept`; if it
    `saves_more`, that is there only after it ran."""

    reads: Sequence[str]
    writes: Sequence[str]
    kept: Sequence[str]
    saves_more: bool

    @staticmethod
    def call(
        reads: Sequence[str], writes: Sequence[str], kept: Sequence[str],
        saved_bytes: float, is_function: bool, is_matmul: bool,
    ) -> Step:  # fmt: skip
        """`saved_bytes` besides `kept`; `is_matmul`: these are copies."""
        copies = reads if saved_bytes else ()
        saves_more = is_function or (saved_bytes > 0 and not is_matmul)
        return Step(reads, writes, (*kept, *copies), saves_more)


@dataclass(frozen=True)
class Needs:
    """Position of a step -> the steps that it needs: `read` to run, `kept` for its backward."""

    read: Mapping[int, frozenset[int]]
    kept: Mapping[int, frozenset[int]]

    @staticmethod
    def of(start: int, steps: Iterable[Step]) -> Needs:
        """What consecutive steps, from position `start` on, need of each other."""
        made: dict[str, int] = {}
        read, kept = dict[int, frozenset[int]](), dict[int, frozenset[int]]()
        for i, step in enumerate(steps, start):
            read[i] = frozenset(made[name] for name in step.reads if name in made)
            made |= dict.fromkeys(step.writes, i)
            own = {i} if step.saves_more else set()
            kept[i] = frozenset(own | {made[name] for name in step.kept if name in made})
        return Needs(read, kept)

    def reruns(self, i: int, again: Collection[int]) -> set[int]:
        """The steps, of those in `again`, that run before the backward of step `i`."""
        found, left = set[int](), [k for k in self.kept[i] if k in again]
        while left:
            if (k := left.pop()) not in found:
                found.add(k)
                left += (j for j in self.read[k] if j in again)
        return found


def line_needs(body: Sequence[Line], start: int, stop: int) -> Needs:
    """What lines `start` to `stop` - 1 of a body need of each other."""
    return _needs_of(body, range(start, stop), ())


def _needs_of(body: Sequence[Line], positions: range, order: Iterable[Backward]) -> Needs:
    """What lines need of each other, for these backwards of them."""
    works = {work.position: work for work in order}
    each = (_step(body[i], works.get(i) or Backward(i)) for i in positions)
    return Needs.of(positions.start, each)


def _step(line: Line, work: Backward) -> Step:
    if not isinstance(line, CallLine):
        return Step(line.reads, line.writes, (), False)
    is_function = line.lowered is not None or function_of(line.target) is not None
    is_matmul = line.flops > 0 and not line.saves_more
    step = Step.call(line.reads, line.writes, line.keeps, line.saved_bytes, is_function, is_matmul)
    return replace(step, kept=[name for name in step.kept if work.reads(name)])

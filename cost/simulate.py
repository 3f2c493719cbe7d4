"""When everything of a step happens: the runtime's own actions, with durations.

    before      every stage gathers its parameters                              once
    schedule    the actions of `Pipeline.schedule`, in the executor's order:
                  forward, backward   wait for what they receive, then take their time
                  messages            a run of them is posted at once and takes no time of the
                                      stage; a transfer starts when both ends are posted and
                                      the sender's earlier transfers are over
                At most as many posted batches as stages are under way (`Crossings.post`).
    after       gradients to storage; tied gradients between two stages at a time; the loss on
                all ranks; the optimizer                                        once

A stage is its busiest rank. At any time it computes, calls collectives (which compute waits
for), waits while what it needs is being transferred, or is idle:

    step_time_s = compute_s + collectives_s + waited_s + update_s + idle_s      on every stage
    bubble      = sum over stages of n_ranks idle_s / (n_ranks of all x step_time_s)

With equal stages, free messages and nothing before or after, that is the textbook's
(p - 1) / (m + p - 1). Transfers and collectives that share a link do not slow each other down.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autopar.schedule import Action, Schedule

_US_PER_S = 1e6


@dataclass(frozen=True)
class Spent:
    """Seconds of a rank: its own work, and collectives inside its stage."""

    compute_s: float = 0.0
    collectives_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.collectives_s


@dataclass(frozen=True)
class StageTimes:
    """How long the parts of a step take on one stage; `forward`, `backward` of a microbatch."""

    n_ranks: int
    before: Spent
    forward: Spent
    backward: Spent
    after: Spent
    update_s: float


@dataclass(frozen=True)
class TieTimes:
    """An exchange of tied gradients: between two stages, then inside each of them."""

    stages: tuple[int, int]
    exchange_s: float
    inside_s: tuple[float, float]


@dataclass(frozen=True)
class Event:
    """What a stage does from `start_s` to `end_s`; a message is listed on its sender's stage."""

    stage: int
    action: str
    start_s: float
    end_s: float
    is_message: bool = False


@dataclass
class StageTotals:
    """Seconds of a stage over the step, by what it does; `sending_s` may be hidden."""

    n_ranks: int
    compute_s: float = 0.0
    collectives_s: float = 0.0
    waited_s: float = 0.0
    update_s: float = 0.0
    sending_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Compute and communication, hidden or not."""
        return self.compute_s + self.comm_s + self.update_s

    @property
    def comm_s(self) -> float:
        return self.collectives_s + self.sending_s

    @property
    def exposed_comm_s(self) -> float:
        return self.collectives_s + self.waited_s


@dataclass(frozen=True)
class Timeline:
    """One simulated step. Times of a rank are those of the busiest stage."""

    events: tuple[Event, ...]
    stages: tuple[StageTotals, ...]
    step_time_s: float

    @property
    def busiest(self) -> StageTotals:
        """The stage with the most compute and communication."""
        return max(self.stages, key=lambda stage: stage.busy_s)

    @property
    def compute_time_s(self) -> float:
        return self.busiest.compute_s

    @property
    def comm_time_s(self) -> float:
        return self.busiest.comm_s

    @property
    def exposed_comm_s(self) -> float:
        return self.busiest.exposed_comm_s

    @property
    def bubble(self) -> float:
        """Idle time / total, over all ranks; 0 where one stage never waits for another."""
        total_s = self.step_time_s * sum(stage.n_ranks for stage in self.stages)
        if len(self.stages) == 1 or not total_s:
            return 0.0
        return sum(s.n_ranks * self.idle_s(i) for i, s in enumerate(self.stages)) / total_s

    def idle_s(self, stage: int) -> float:
        """Seconds in which a stage neither works nor waits for a transfer under way."""
        s = self.stages[stage]
        worked_s = s.compute_s + s.collectives_s + s.waited_s + s.update_s
        return max(self.step_time_s - worked_s, 0.0)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the events for chrome://tracing or Perfetto: a process per stage."""
        entries = [
            {
                "name": e.action, "ph": "X", "pid": e.stage, "tid": int(e.is_message),
                "ts": e.start_s * _US_PER_S, "dur": (e.end_s - e.start_s) * _US_PER_S,
            }
            for e in self.events
        ]  # fmt: skip
        names = [
            {"name": "process_name", "ph": "M", "pid": k, "args": {"name": f"stage {k}"}}
            for k in range(len(self.stages))
        ]
        Path(path).write_text(json.dumps({"traceEvents": [*names, *entries]}), encoding="utf-8")


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    message_s: Callable[[Action], float] = lambda action: 0.0,
    ties: Sequence[TieTimes] = (),
    loss_s: float = 0.0,
) -> Timeline:
    """Play one step of a lowered schedule.

    message_s   of a send: how long its transfer takes
    loss_s      of giving the loss to all ranks
    """
    run = _Run(schedule, stages, message_s)
    for stage, times in enumerate(stages):
        run.work(stage, "gather parameters", times.before)
    run.actions()
    for stage, times in enumerate(stages):
        run.work(stage, "sync gradients", times.after)
    for tie in ties:
        run.together(tie.stages, "tied gradients", tie.exchange_s)
        for stage, inside_s in zip(tie.stages, tie.inside_s, strict=True):
            run.work(stage, "tied gradients", Spent(0.0, inside_s))
    if len(stages) > 1:
        run.together(range(len(stages)), "loss", loss_s)
    for stage, times in enumerate(stages):
        run.update(stage, times.update_s)
    return Timeline(tuple(run.events), tuple(run.totals), max(run.clock))


@dataclass
class _Run:
    """The state of a simulation: every stage's clock, and what was posted and transferred.

    A transfer is known by its send; `moved` says when it started and ended.
    """

    schedule: Schedule
    stages: Sequence[StageTimes]
    message_s: Callable[[Action], float]
    events: list[Event] = field(default_factory=list)
    posted: dict[Action, float] = field(default_factory=dict)
    moved: dict[Action, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.schedule.is_lowered or self.schedule.n_stages == 1, "nothing is sent"
        assert self.schedule.n_stages == len(self.stages), "a schedule of other stages"
        self.clock = [0.0] * len(self.stages)
        self.link_free = [0.0] * len(self.stages)
        self.queues: list[list[Action]] = [[] for _ in self.stages]
        self.totals = [StageTotals(times.n_ranks) for times in self.stages]

    # -- what takes a stage's time -----------------------------------------------------------

    def work(self, stage: int, action: str, spent: Spent) -> None:
        if spent.total_s:
            self._advance(stage, action, spent.total_s)
        self.totals[stage].compute_s += spent.compute_s
        self.totals[stage].collectives_s += spent.collectives_s

    def together(self, stages: Iterable[int], action: str, time_s: float) -> None:
        """A call that the stages start together."""
        stages = list(stages)
        start_s = max(self.clock[stage] for stage in stages)
        for stage in stages:
            self.clock[stage] = start_s
            self.work(stage, action, Spent(0.0, time_s))

    def update(self, stage: int, time_s: float) -> None:
        if time_s:
            self._advance(stage, "optimizer", time_s)
        self.totals[stage].update_s += time_s

    def _advance(self, stage: int, action: str, time_s: float) -> None:
        start_s = self.clock[stage]
        self.clock[stage] = start_s + time_s
        self.events.append(Event(stage, action, start_s, self.clock[stage]))

    # -- the schedule ------------------------------------------------------------------------

    def actions(self) -> None:
        """All stages' actions; a stage that must wait lets the others go on."""
        left = [self._stage(stage) for stage in range(len(self.stages))]
        while left:
            before = (len(self.posted), len(self.events))
            n_left = len(left)
            left = [stage for stage in left if next(stage, "done") != "done"]
            progress = len(left) < n_left or (len(self.posted), len(self.events)) != before
            assert progress, "stages wait for each other for ever; the schedule was not validated"

    def _stage(self, stage: int) -> Iterator[str]:
        """One stage's actions; gives way where it cannot go on."""
        actions = self.schedule.stages[stage]
        receives: dict[tuple[str, int], list[Action]] = {}
        for action in actions:
            if not action.is_compute and not action.is_send:
                compute = action.kind.removeprefix("recv_")
                receives.setdefault((compute, action.microbatch), []).append(action.partner)
        batches: list[list[Action]] = []
        for is_compute, group in itertools.groupby(actions, lambda a: a.is_compute):
            if not is_compute:
                batches += self._post(stage, list(group))
                while len(batches) > len(self.stages):
                    yield from self._wait(stage, batches.pop(0))
                continue
            for action in group:
                yield from self._wait(stage, receives.get((action.kind, action.microbatch), ()))
                times = self.stages[stage]
                spent = times.forward if action.kind == "forward" else times.backward
                self.work(stage, str(action), spent)

    def _post(self, stage: int, messages: Sequence[Action]) -> list[list[Action]]:
        """Post a run of messages; returns its sends as a batch, if there are any."""
        for action in messages:
            self.posted[action] = self.clock[stage]
        sends = [action for action in messages if action.is_send]
        self.queues[stage] += sends
        return [sends] if sends else []

    def _wait(self, stage: int, sends: Sequence[Action]) -> Iterator[str]:
        """Until all of `sends` have arrived."""
        while not all(send in self.moved for send in sends):
            self._transfer()
            if not all(send in self.moved for send in sends):
                yield "waits"
        ready_s = self.clock[stage]
        moves = sorted(self.moved[send] for send in sends)
        for start_s, end_s in moves:
            at_s = self.clock[stage]
            if end_s > at_s:
                self.totals[stage].waited_s += end_s - max(start_s, at_s)
                self.clock[stage] = end_s
        assert self.clock[stage] >= ready_s

    def _transfer(self) -> None:
        """Everything that can be transferred, in the order in which each stage posted it."""
        for stage, queue in enumerate(self.queues):
            while queue and queue[0].partner in self.posted:
                send = queue.pop(0)
                ends = self.posted[send], self.posted[send.partner]
                start_s = max(self.link_free[stage], *ends)
                end_s = start_s + self.message_s(send)
                self.moved[send] = start_s, end_s
                self.link_free[stage] = end_s
                self.totals[stage].sending_s += end_s - start_s
                self.events.append(Event(stage, str(send), start_s, end_s, is_message=True))

"""What the page is made of: a plan, and all that was computed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.cost.simulate import Timeline
from autopar.plans import PlanData, Predicted, RunnerUp
from autopar.program.communication import Collective
from autopar.program.lines import Pipeline
from autopar.report.words import Remark


@dataclass(frozen=True)
class Help:
    """What another option, machine or batch would change.

    what         in words, as "links between nodes twice as fast"
    step_time_s  of the same plan then; None if it does not run, or was not simulated
    gain         samples per second, relative to the plan, minus 1
    note         why there is no time, or what the time leaves out
    command      a command or Python that shows it
    peak_bytes   of a rank then
    """

    what: str
    step_time_s: float | None
    gain: float | None
    note: str
    command: str
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Subject:
    """A bound plan. `costs` and `runners_up` are by stage; `sources` are its generated files.

    `choices` and `machine` would help; `command` plans it again.
    """

    data: PlanData
    pipeline: Pipeline
    predicted: Predicted
    collectives: Sequence[Collective]
    costs: Sequence[CostModel]
    timeline: Timeline
    hardware: Hardware
    runners_up: Sequence[Mapping[str, Sequence[RunnerUp]]]
    choices: Sequence[Help]
    machine: Sequence[Help]
    command: str
    sources: Mapping[str, str]
    assumed: Sequence[Remark]

    @property
    def limit_bytes(self) -> float:
        """Bytes of a device that the plan was made for."""
        return self.data.limit_bytes or self.hardware.memory_limit_bytes

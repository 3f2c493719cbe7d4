"""Messages of pipelines as on a slow network: `make bench-runtime` compares steps with simulations.

Every message between two ranks takes `delay_s` seconds. Of messages one way, one is under way at a
time. The n-th one starts when both ends are posted, as in the simulator (`autopar.cost.simulate`):

    end(n) = max(sent(n), received(n), end(n - 1)) + delay_s        (`MessageDelays._end_s`)

A rank that waits for a message, to read it or to use what it sent again, sleeps until its end. So a
delay costs nothing where a rank works meanwhile. Both ranks know both times: they write them into
one file, and the clocks of processes of one machine agree.

`measure` runs pairs of steps, one without delays and one with. Of the first it takes the seconds of
every action, without waits (`autopar.runtime.flight`). The simulation of the second has these
seconds, and `delay_s` for each message. The ratio is that of the delayed step to its simulation.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from autopar.cost.simulate import PartWork, SplitBackward, StageTimes, simulate
from autopar.runtime.collectives import DistMessenger, Posted, Receive, Send
from autopar.runtime.groups import current_context
from autopar.schedule import Script
from autopar.units import format_seconds
from examples.compare import Batch, median_ratio, step_time_s

_N_MOST = 1 << 14  # messages from one rank to another
_COMPUTE = re.compile(r"(\d+)([FBIW])\d+")
_PHASE = "p2p"
# A rank's seconds in one step, by action: of the schedule, or several messages, or "begin".
OwnSeconds = Mapping[str, float]


class MessageDelays:
    """Delays every message of a schedule inside a `with` block, on this rank.

    Every rank must be inside at the same time, with the same new file at `path`. `n_messages`
    counts what this rank sent. `clock` and `sleep` are replaced in tests.
    """

    def __init__(
        self,
        delay_s: float,
        path: Path,
        n_ranks: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.delay_s, self.n_messages = delay_s, 0
        self._clock, self._sleep = clock, sleep
        shape = 2, n_ranks, n_ranks, _N_MOST  # sent or received, from, to, number
        path.touch()
        self._posted_s = np.memmap(path, np.float64, "r+", shape=shape)  # 0: not yet
        self._n_posted = Counter[tuple[int, int, int]]()
        self._ends_s: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def __enter__(self) -> MessageDelays:
        self._own = DistMessenger.post
        own, delays = self._own, self

        def post(
            messenger: DistMessenger,
            sends: Sequence[Send],
            receives: Sequence[Receive],
            phase: str = _PHASE,
        ) -> Posted:
            if phase != _PHASE:
                return own(messenger, sends, receives, phase)
            rank = messenger.rank
            sent = [delays._post(0, rank, peer) for _, peer in sends]
            received = [delays._post(1, peer, rank) for _, _, peer in receives]
            delays.n_messages += len(sent)
            return _Delayed(own(messenger, sends, receives, phase), sent, received)

        DistMessenger.post = post  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        DistMessenger.post = self._own  # type: ignore[method-assign]

    def _post(self, end: int, source: int, target: int) -> Callable[[], None]:
        """Note that an end of the next message is posted; what sleeps until its end."""
        number = self._n_posted[end, source, target]
        self._n_posted[end, source, target] += 1
        self._posted_s[end, source, target, number] = self._clock()
        return partial(self._wait, source, target, number)

    def _wait(self, source: int, target: int, number: int) -> None:
        left_s = self._end_s(source, target, number) - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def _end_s(self, source: int, target: int, number: int) -> float:
        """When a message ends. It has been sent, so both ends of earlier ones are posted."""
        ends_s = self._ends_s[source, target]
        while len(ends_s) <= number:
            both_s = self._posted_s[:, source, target, len(ends_s)]
            assert both_s.all(), f"message {len(ends_s)} of {source} to {target} is not posted"
            ends_s.append(max(*both_s.tolist(), ends_s[-1] if ends_s else 0.0) + self.delay_s)
        return ends_s[number]


class _Delayed(Posted):
    """A batch whose messages last until their ends."""

    def __init__(
        self,
        posted: Posted,
        sent: Sequence[Callable[[], None]],
        received: Sequence[Callable[[], None]],
    ) -> None:
        self._posted, self._sent, self._received = posted, sent, received

    def wait_received(self, start: int = 0, end: int | None = None) -> list[Tensor]:
        found = self._posted.wait_received(start, end)
        for wait in self._received[start:end]:
            wait()
        return found

    def is_sent(self) -> bool:
        return self._posted.is_sent()

    def wait_sent(self) -> None:
        self._posted.wait_sent()
        for wait in self._sent:
            wait()


@dataclass(frozen=True)
class Delayed:
    """Seconds (measured, simulated) of each step without delays and of each one with."""

    delay_s: float
    n_messages: int
    without: list[tuple[float, float]]
    pairs: list[tuple[float, float]]


def measure(
    step: Callable[[Batch], object], script: Script, batch: Batch, n_pairs: int, share: float
) -> Delayed:
    """One rank's part. A message takes `share` of a mean forward of a stage; `step` is warm."""
    pace = current_context().flight.pace

    def paced() -> tuple[float, list[OwnSeconds]]:
        pace.take()
        pace.is_on = True
        time_s = step_time_s(step, batch)
        pace.is_on = False
        return time_s, _of_all_ranks(pace.take())

    first = [stage_times(script, paced()[1]) for _ in range(3)]
    delay_s = share * statistics.median(s.forward.compute_s for stages in first for s in stages)
    without, pairs = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(_of_all_ranks(folder)[0]) / "posted"
        delays = MessageDelays(delay_s, path, dist.get_world_size())
        for _ in range(n_pairs):
            time_s, own_s = paced()
            stages = stage_times(script, own_s)
            without.append((time_s, simulate(script, stages, 0.0).step_time_s))
            with delays:
                delayed_s = step_time_s(step, batch)
            pairs.append((delayed_s, simulate(script, stages, delay_s).step_time_s))
        dist.barrier()  # the file is there until all ranks are done
    return Delayed(delay_s, delays.n_messages // n_pairs, without, pairs)


def stage_times(script: Script, own_s: Sequence[OwnSeconds]) -> list[StageTimes]:
    """The times of every stage, from the seconds of each rank; one rank is one device.

    An action has the mean of its microbatches. To post messages is work of the actions of a rank,
    equally much of each.
    """
    found: list[StageTimes] = []
    for stage, device in enumerate(script.devices):
        computes = {text: s for text, s in own_s[device].items() if _COMPUTE.fullmatch(text)}
        before_s = own_s[device].get("begin", 0.0)
        posts_s = sum(own_s[device].values()) - sum(computes.values()) - before_s
        means_s = {
            letter: statistics.mean(s for text, s in computes.items() if _is(text, stage, letter))
            + posts_s / len(computes)
            for letter in {text.lstrip("0123456789")[0] for text in computes}
        }
        works = {letter: PartWork(time_s) for letter, time_s in means_s.items()}
        backward = works.get("B") or SplitBackward(works["I"], works["W"])
        is_first = device not in script.devices[:stage]
        before = PartWork(before_s if is_first else 0.0)
        found.append(StageTimes(1, before, works["F"], backward, PartWork(), 0.0))
    return found


def _is(text: str, stage: int, letter: str) -> bool:
    match = _COMPUTE.fullmatch(text)
    return match is not None and match.groups() == (str(stage), letter)


def _of_all_ranks(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def table_of(found: Mapping[str, Delayed]) -> Table:
    table = Table(title="step time with delayed messages beside its simulation, float32")
    table.add_column("row")
    for title in ("pairs", "messages", "each", "no delays", "simulated", "delayed", "simulated",
                  "ratio", "90% interval"):  # fmt: skip
        table.add_column(title, justify="right")
    for name, seen in found.items():
        columns = [*zip(*seen.without, strict=True), *zip(*seen.pairs, strict=True)]
        medians = [format_seconds(statistics.median(column)) for column in columns]
        ratio, low, high = median_ratio(seen.pairs)
        table.add_row(
            name, str(len(seen.pairs)), str(seen.n_messages), format_seconds(seen.delay_s),
            *medians, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}",
        )  # fmt: skip
    return table

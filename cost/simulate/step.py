"""Simulate one step: when each of the runtime's own actions starts and ends.

    before      every stage gathers its parameters                              once
    schedule    the actions of a schedule, in the executor's order:
                  compute    waits for the messages that it reads, then runs (`times.py`)
                  messages   consecutive ones are posted at once, in no device time; a transfer
                             starts when both ends are posted and the sender's earlier
                             transfers are over
                At most as many posted batches are under way as there are devices
                (`Crossings.post` in `runtime/collectives/crossings.py`).
                Gradient sync may run beside the last backward (`times.py`).
    after       gradients to storage; tied gradients between two stages at a time; the loss on
                all ranks; the optimizer                                        once

A device is the set of ranks that share a row of the schedule, timed by the busiest of them. It runs
one stage, or several if the schedule is interleaved. At any time it computes, runs collectives that
compute waits for, waits for a transfer under way, or is idle:

    step_time_s = compute_s + collectives_s + waited_s + update_s + idle_s      on every device
    bubble      = sum over devices of n_ranks idle_s / (n_ranks of all x step_time_s)
                                                                          (`Timeline.bubble`)

With equal stages, free messages and nothing before or after, the bubble is the textbook's
(p - 1) / (m + p - 1), or (p - 1) / (v m + p - 1) with v chunks per device. Transfers and
collectives on the same link do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cost.simulate.simulation import StepSimulation
from autopar.cost.simulate.timeline import Timeline
from autopar.cost.simulate.times import PartWork, StageTimes, TieTimes
from autopar.errors import OptionError
from autopar.schedule import Action, Schedule, Script, script_of


def simulate(
    schedule: Schedule | Script,
    stages: Sequence[StageTimes],
    message_s: Callable[[Action], float] | float = 0.0,
    ties: Sequence[TieTimes] = (),
    loss_s: float = 0.0,
    *,
    slow: tuple[int, float] | None = None,
    jitter: tuple[float, int] | None = None,
    sends_as_made: bool = False,
) -> Timeline:
    """Simulate one step of a valid schedule, or of its script (`script_of`), which can be reused.

    stages          the times of each stage; a device has n_chunks of them
    message_s       seconds of a send's transfer, equal for all microbatches; or one number for all
                    sends. A schedule without messages gets those of a chain of stages.
    loss_s          seconds to give the loss to all ranks
    slow            (device, factor): its compute takes factor times as long
    jitter          (fraction, seed): every compute takes longer by up to this fraction of itself
    sends_as_made   in a schedule without messages, send each one as soon as it is made

    Raises `OptionError` for a slow device that does not exist, and for a `slow` or `jitter` that
    would speed compute up.
    """
    _check_options(len(schedule.rows), slow, jitter)
    if isinstance(schedule, Schedule):
        schedule = script_of(schedule, sends_as_made)
    simulation = StepSimulation(
        schedule, stages, message_s if callable(message_s) else lambda send: message_s, slow, jitter
    )
    for stage, times in enumerate(stages):
        simulation.work(stage, "gather parameters", times.before)
    simulation.actions()
    for stage, times in enumerate(stages):
        simulation.work(stage, "sync gradients", times.after)
    for tie in ties:
        simulation.together(tie.stages, "tied gradients", tie.exchange_s)
        for stage, inside_s in zip(tie.stages, tie.inside_s, strict=True):
            simulation.work(stage, "tied gradients", PartWork(0.0, inside_s))
    if len(schedule.rows) > 1:
        simulation.together(range(len(stages)), "loss", loss_s)
    for stage, times in enumerate(stages):
        simulation.update(stage, times.update_s)
    return Timeline(
        simulation.record(),
        tuple(simulation.totals),
        max(device.clock_s for device in simulation.devices),
    )


def _check_options(
    n_devices: int, slow: tuple[int, float] | None, jitter: tuple[float, int] | None
) -> None:
    if slow is not None and not (0 <= slow[0] < n_devices and slow[1] >= 1):
        raise OptionError(
            f"slow={slow!r} is not one of {n_devices} devices and a factor of at least 1",
            hint="slow=(0, 1.2): compute of the first takes a fifth longer",
        )
    if jitter is not None and not jitter[0] >= 0:
        raise OptionError(
            f"jitter={jitter!r} is not a fraction of at least 0 and a seed",
            hint="jitter=(0.1, 0): every compute takes up to a tenth longer",
        )

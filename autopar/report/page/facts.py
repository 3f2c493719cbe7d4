"""All that the page shows, as JSON: `plan.to_json()`. The page computes nothing but sums of it.

    model, chosen, headline     what was planned, and which candidate won
    verdict, warnings           sentences
    setting                     mesh, inputs, precision, optimizer, microbatches, schedule, hash
    predicted, figures          `Predicted`; the same per device and per trillion tokens
    interval_s                  80% of steps are between these two; null if nothing is known of them
    error                       what the error is that alternatives may be within
    optimality, assumptions     lines
    time, memory                the two bars (`bars.py`, `memory.py`)
    live                        memory over the step (`memory.py`)
    command                     what plans it again
    choices, machine            what other options or machines would change (`subject.py`)
    alternatives                candidates of the search; `chosen` marks the plan's own,
                                `within_error` those that may be as fast
    stages                      the graph of each (`graph.py`)
    timeline                    the simulated step (`timeline.py`)
    parameters, collectives, crossings, ties, devices     tables (`tables.py`)
    code                        generated files

Times are seconds of one step, bytes are of one rank.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

from autopar.cost.price import summary_of
from autopar.plans import Alternative
from autopar.report.device_rates import DeviceRates
from autopar.report.page.bars import time_bar
from autopar.report.page.graph import graphs
from autopar.report.page.memory import memory_bar, memory_facts
from autopar.report.page.subject import Subject
from autopar.report.page.tables import (
    collective_table,
    crossing_table,
    device_groups,
    parameter_table,
    tie_texts,
)
from autopar.report.page.timeline import timeline_facts
from autopar.report.tables import (
    ERROR_TEXT,
    alternative_note,
    chosen_s,
    headline,
    idle_warnings,
    is_within_error,
    optimality,
)
from autopar.report.words import verdict

FORMAT, VERSION = "autopar plan facts", 1


def plan_facts(subject: Subject) -> dict[str, Any]:
    """The facts as plain data; this file's docstring says what each is."""
    data = subject.data
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": data.model,
        "chosen": data.chosen,
        "headline": headline(data),
        "verdict": verdict(
            data, subject.pipeline, subject.predicted, subject.timeline, subject.hardware
        ),
        "warnings": idle_warnings(data),
        "setting": _setting(subject),
        "predicted": asdict(subject.predicted),
        "figures": asdict(
            DeviceRates.of(subject.predicted, subject.hardware, subject.pipeline.n_ranks)
        ),
        "interval_s": subject.predicted.interval_s,
        "error": ERROR_TEXT,
        "optimality": optimality(data, subject.predicted.step_time_s),
        "assumptions": [str(line) for line in subject.assumed],
        "time": time_bar(subject.pipeline, subject.costs, subject.timeline),
        "memory": memory_bar(subject.pipeline, data.optimizer, subject.limit_bytes),
        "live": memory_facts(subject),
        "command": subject.command,
        "choices": [asdict(row) for row in subject.choices],
        "machine": [asdict(row) for row in subject.machine],
        "alternatives": [_alternative(row, subject) for row in data.alternatives],
        "stages": graphs(subject),
        "timeline": timeline_facts(subject),
        "parameters": parameter_table(subject),
        "collectives": collective_table(subject),
        "crossings": crossing_table(subject),
        "ties": tie_texts(subject),
        "devices": device_groups(subject),
        "code": dict(subject.sources),
    }


def facts_json(subject: Subject) -> str:
    """The facts as JSON; a number that is not finite is null."""
    return json.dumps(_finite(plan_facts(subject)), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _alternative(row: Alternative, subject: Subject) -> dict[str, Any]:
    """What the search found out about it, and why it is not the plan; of the plan, its summary."""
    is_chosen = row.name == subject.data.chosen
    if is_chosen:
        on = subject.pipeline, subject.costs, subject.timeline, subject.data.optimizer
        row = replace(row, summary=summary_of(*on))
    return asdict(row) | {
        "chosen": is_chosen,
        "why": alternative_note(row, subject.data),
        "within_error": not is_chosen
        and is_within_error(subject.predicted, chosen_s(subject.data), row.step_time_s),
    }


def _setting(subject: Subject) -> dict[str, Any]:
    data = subject.data
    return {
        "mesh": list(data.mesh.shape),
        "n_ranks": subject.pipeline.n_ranks,
        "hardware": data.mesh.hardware,
        "inputs": [f"{i.path} {i.dtype}{list(i.shape)}" for i in data.inputs],
        "precision": data.precision,
        "optimizer": data.optimizer,
        "microbatches": data.microbatches,
        "schedule": data.schedule,
        "graph_hash": data.graph_hash,
    }

"""A plan in words: what is sharded, what it communicates, what it cost and what it beat."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.collective import Collective
from autopar.errors import OptionError
from autopar.plan_data import PlanData
from autopar.predicted import Predicted
from autopar.report.tables import headline, idle_warning, parameter_rows, traffic_rows
from autopar.stage_program import CallLine, GatherLine, MoveLine, StageProgram, StoredParameter
from autopar.units import format_bytes, format_count, format_seconds


def explain(
    data: PlanData,
    program: StageProgram,
    predicted: Predicted,
    collectives: Sequence[Collective],
    name: str | None = None,
) -> str:
    """The whole plan, or one parameter or operator.

    Raises `OptionError` for a name the plan does not have.
    """
    if name is not None:
        return _explain_one(data, program, name)
    parts = [
        _header(data),
        _parameters(program),
        _communication(collectives),
        _prediction(predicted),
        _alternatives(data),
    ]
    return "\n\n".join(part for part in parts if part)


def _header(data: PlanData) -> str:
    idle = idle_warning(data)
    return headline(data) + (f"\n  {idle}" if idle else "")


def _parameters(program: StageProgram) -> str:
    rows = parameter_rows(program)
    width = max((len(row.pattern) for row in rows), default=9)
    axes = " ".join(program.axis_names)
    lines = [f"{'parameter':{width}}  count  {'stored':16} {'used':16} shape   (on {axes})"]
    lines += [
        f"{r.pattern:{width}}  {r.count:5}  {r.stored:16} {r.used:16} {r.shape}" for r in rows
    ]
    return "\n".join(lines)


def _communication(collectives: Sequence[Collective]) -> str:
    if not collectives:
        return "no communication"
    lines = [f"{'phase':13} {'collective':15} {'axis':8} {'calls':>6}  bytes per step and rank"]
    lines += [
        f"{r.phase:13} {r.kind:15} {r.axis:8} {r.calls:6}  {format_bytes(r.size_bytes)}"
        for r in traffic_rows(collectives)
    ]
    return "\n".join(lines)


def _prediction(predicted: Predicted) -> str:
    words = [
        f"predicted: step {format_seconds(predicted.step_time_s)} "
        f"(compute {format_seconds(predicted.compute_time_s)}, "
        f"communication {format_seconds(predicted.comm_time_s)})",
        f"peak {format_bytes(predicted.peak_bytes)} per rank",
    ]
    if predicted.tokens_per_s:
        words.append(f"{format_count(predicted.tokens_per_s)} tokens/s")
    if predicted.mfu:
        words.append(f"MFU {predicted.mfu:.1%}")
    return ", ".join(words)


def _alternatives(data: PlanData) -> str:
    if len(data.alternatives) < 2:
        return ""
    width = max(len(a.name) for a in data.alternatives)
    lines = ["considered"]
    for a in data.alternatives:
        mark = "->" if a.name == data.chosen else "  "
        time = "-" if a.step_time_s is None else format_seconds(a.step_time_s)
        lines.append(f" {mark} {a.name:{width}}  {time:>9}  {a.note}".rstrip())
    return "\n".join(lines)


def _explain_one(data: PlanData, program: StageProgram, name: str) -> str:
    for parameter in program.parameters:
        if name in (parameter.name, *parameter.aliases):
            return _explain_parameter(parameter, program)
    lines = [
        line for line in program.body
        if isinstance(line, CallLine) and (line.key == name or line.key.startswith(f"{name}/"))
    ]  # fmt: skip
    if not lines:
        raise OptionError(
            f"the plan has no parameter, operator or module {name!r}",
            hint="names are those of model.named_parameters() and the keys in the plan file",
        )
    out = []
    for line in lines:
        total_s = line.forward_s + line.backward_s
        out.append(f"{line.key}  ({line.where})")
        out.append(f"  {data.operators[line.key]}")
        out.append(f"  {format_seconds(total_s)} forward and backward per microbatch")
    return "\n".join(out)


def _explain_parameter(parameter: StoredParameter, program: StageProgram) -> str:
    stored = parameter.stored
    out = [
        f"{parameter.name} {list(parameter.shape)}: stored {stored.spec} as {list(stored.shape)} "
        f"on ({', '.join(program.axis_names)})",
    ]
    for use in parameter.uses:
        out.append(f"  used {use.local.spec}" + _conversion(use.moves))
    for line in program.body:
        if isinstance(line, GatherLine) and line.parameter == parameter.name:
            out.append(f"  gathered for one operator as {line.out.spec}" + _conversion(line.moves))
    return "\n".join(out)


def _conversion(moves: Sequence[MoveLine]) -> str:
    if not moves:
        return ", as it is stored"
    words = [f"{m.move.name} (forward {m.move.forward}, backward {m.move.backward})" for m in moves]
    return " by " + ", ".join(words)

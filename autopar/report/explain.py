"""A plan in words: what is sharded, what it communicates, what it cost and what it beat."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.collective import Collective
from autopar.errors import OptionError
from autopar.plan_data import PlanData
from autopar.predicted import Predicted
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
    axes = " x ".join(f"{axis}={size}" for axis, size in data.axes.items())
    batches = "microbatch" if data.microbatches == 1 else "microbatches"
    line = f"{data.model} on ({axes}), {data.microbatches} {batches}: {data.chosen}"
    idle = _idle_axes(data)
    if idle:
        line += f"\n  axis {', '.join(idle)} does the same work on every rank: splitting costs more"
    return line


def _idle_axes(data: PlanData) -> list[str]:
    """Axes of several ranks on which nothing is sharded."""
    out = []
    for position, (axis, size) in enumerate(data.axes.items()):
        texts = (*data.operators.values(), *data.parameters.values())
        sharded = any(
            _placement(spec, position).startswith("S") for text in texts for spec in _specs(text)
        )
        if size > 1 and not sharded:
            out.append(axis)
    return out


def _specs(text: str) -> list[str]:
    body = text.partition(";")[0]
    return [s.strip() for side in body.split("->") for s in side.split(",") if s.strip()]


def _placement(spec: str, position: int) -> str:
    words = spec.split(" order ")[0].split()
    return words[position] if position < len(words) else ""


def _parameters(program: StageProgram) -> str:
    """Parameters grouped by how they are kept: `h.*.mlp.c_fc.weight`."""
    rows: dict[tuple[str, str, str, str], list[StoredParameter]] = {}
    for parameter in program.parameters:
        uses = ", ".join(dict.fromkeys(str(u.local.spec) for u in parameter.uses)) or "each use"
        pattern = ".".join("*" if part.isdigit() else part for part in parameter.name.split("."))
        key = (pattern, str(list(parameter.shape)), str(parameter.stored.spec), uses)
        rows.setdefault(key, []).append(parameter)
    width = max((len(key[0]) for key in rows), default=9)
    axes = " ".join(program.axis_names)
    lines = [f"{'parameter':{width}}  count  {'stored':16} {'used':16} shape   (on {axes})"]
    for (pattern, shape, stored, uses), members in rows.items():
        period = members[0].period
        kept = stored if period == "step" else f"{stored} {period}"
        lines.append(f"{pattern:{width}}  {len(members):5}  {kept:16} {uses:16} {shape}")
    return "\n".join(lines)


def _communication(collectives: Sequence[Collective]) -> str:
    if not collectives:
        return "no communication"
    rows: dict[tuple[str, str, str], list[int]] = {}
    for c in collectives:
        axis = c.axis if isinstance(c.axis, str) else "+".join(c.axis)
        total = rows.setdefault((c.phase, c.kind, axis), [0, 0])
        total[0] += c.count
        total[1] += c.count * c.size_bytes
    lines = [f"{'phase':13} {'collective':15} {'axis':8} {'calls':>6}  bytes per step and rank"]
    for (phase, kind, axis), (count, size_bytes) in rows.items():
        lines.append(f"{phase:13} {kind:15} {axis:8} {count:6}  {format_bytes(size_bytes)}")
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

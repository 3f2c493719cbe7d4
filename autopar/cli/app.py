"""The commands of `autopar`. Each returns a `Result`; see the package for exit codes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.models import is_plan_file, load_subject
from autopar.cli.options import (
    PlanRequest,
    parse_bytes,
    parse_counts,
    parse_mesh,
    takes_planning_options,
)
from autopar.cli.shell import (
    ErrorGroup,
    JsonMayNameFile,
    Result,
    note,
    prints_result,
    progress,
    to_json,
)
from autopar.errors import NotSupportedError, OptionError

if TYPE_CHECKING:
    from autopar.cli.models import Subject
    from autopar.planning import Plan

# Plain help: the same text in a terminal, a pipe and a golden file.
app = typer.Typer(
    cls=ErrorGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="package.module:factory, or a config.json.")
]
ModelOrPlan = Annotated[
    str, typer.Argument(metavar="MODEL|PLAN.json", help="A model to plan, or a saved plan.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The model of PLAN.json.")
]


def main() -> None:
    """The entry of the `autopar` script."""
    app()


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        import autopar

        typer.echo(autopar.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Plan, read and check how a PyTorch model is laid out on devices."""


@app.command()
@prints_result
@takes_planning_options
def plan(
    model: ModelArgument,
    request: PlanRequest,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan.")] = None,
) -> Result:
    """Choose how to run MODEL on a mesh, and explain it."""
    from autopar.cli.summary import plan_json

    made = _plan(model, request)
    if output is not None:
        made.save(output)
        note(f"saved {output}")
    saved = None if output is None else str(output)
    return Result(made.explain(), plan_json(made) | {"saved": saved})


@app.command()
@prints_result
@takes_planning_options
def explain(
    subject: ModelOrPlan,
    request: PlanRequest,
    name: Annotated[str | None, typer.Argument(help="A parameter, operator or module.")] = None,
    model: ModelOption = None,
) -> Result:
    """Explain a plan, or one NAME in it.

    PLAN.json needs --model for costs; alone it gives placements.
    """
    from autopar.cli.summary import data_json, data_text, plan_json

    if is_plan_file(subject) and model is None:
        from autopar.planning import Plan

        _refuse_planning_flags(request)
        data = Plan.load(subject).data
        text = data_text(data, name)
        return Result(text, data_json(data) | {"text": text})
    made = _plan_of(subject, model, request)
    text = made.explain(name)
    return Result(text, plan_json(made) | {"text": text})


@app.command()
@prints_result
@takes_planning_options
def code(
    subject: ModelOrPlan,
    request: PlanRequest,
    model: ModelOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write the files here.")
    ] = None,
) -> Result:
    """Print or write the generated program, one file per stage."""
    if is_plan_file(subject) and model is None:
        raise OptionError(
            "code is made from a plan and its model", hint=f"autopar code {subject} --model MODEL"
        )
    made = _plan_of(subject, model, request)
    files, written = made.code(), []
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for name, source in files.items():
            (output / name).write_text(source)
            written.append(str(output / name))
    text = "\n".join(written) if written else "\n".join(files.values()).rstrip("\n")
    return Result(text, {"files": files, "written": written})


@app.command()
@prints_result
@takes_planning_options
def report(
    subject: ModelOrPlan,
    request: PlanRequest,
    model: ModelOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE.html", help="Write the page here.")
    ] = Path("plan.html"),
) -> Result:
    """Write a plan as a page with its picture.

    One HTML file that loads nothing, and the graph beside it as .dot.
    """
    from autopar.cli.summary import plan_json
    from autopar.report import INSTALL_HINT

    if is_plan_file(subject) and model is None:
        raise OptionError(
            "a report is made from a plan and its model",
            hint=f"autopar report {subject} --model MODEL",
        )
    made = _plan_of(subject, model, request)
    files = made.report(output)
    if not files.picture:
        note(f"{INSTALL_HINT}; its graph is in {files.dot}")
    written = [str(files.page), str(files.dot)]
    data = {"written": written, "picture": files.picture}
    return Result("\n".join(written), plan_json(made) | data)


@app.command()
@prints_result
@takes_planning_options
def verify(model: ModelArgument, request: PlanRequest) -> Result:
    """Compare one sharded step with one process.

    Ranks are threads of this process; loss and every gradient are compared. A config.json gets
    random weights and tokens.
    """
    mesh = request.machine()
    with progress("loading the model") as report:
        subject = _load(model, request, real=True)
        from autopar.verification import verify as verify_model

        report("capturing")
        options = request.options() | {"progress": report}
        found = verify_model(subject.model, mesh, subject.example_inputs, **options)
    data = {
        "equal": found.ok, "worst": found.worst, "tolerance": found.tolerance,
        "errors": dict(found.errors), "stages": [dict(s.axes) for s in found.plan.stages],
        "chosen": found.plan.data.chosen,
    }  # fmt: skip
    # What was checked: a plan that shards nothing is equal without proving much.
    header = found.plan.explain().split("\n\n")[0]
    return Result(f"{found.text()}\n{header}", data, ok=found.ok)


@app.command()
@prints_result
def ops(
    model: ModelArgument,
    batch: Annotated[int | None, typer.Option(help="Rows of the global batch.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Also list dims of parameters that it cannot share.")
    ] = None,
    fallback: Annotated[
        str, typer.Option(help="Operators without a rule: error, or replicate.")
    ] = "error",
) -> Result:
    """List MODEL's operators that have, or lack, a rule.

    Prints counts, the source lines of what has no rule, and what is replaced when it is sharded.
    """
    from autopar.cli.operators import BAD, operator_uses, ops_result, uneven_dims

    n_ranks = math.prod(parse_mesh(mesh)) if mesh is not None else 0
    with progress("loading the model") as report:
        from autopar.options import Options
        from autopar.step_capture import capture_step

        options = Options.of(fallback=fallback)
        subject = load_subject(model, batch, seq)
        report("capturing")
        program = capture_step(subject.model, subject.example_inputs, options)
        uses = operator_uses(program, fallback)
        dims = None
        if n_ranks and not any(use.status in BAD for use in uses):
            replicated = [use.op for use in uses if use.status == "replicated"]
            dims = uneven_dims(program, n_ranks, replicated)
    return ops_result(uses, dims, n_ranks)


@app.command()
@prints_result
def cost(
    kind: Annotated[str, typer.Argument(metavar="COLLECTIVE", help="all_reduce, all_gather ...")],
    ranks: Annotated[int, typer.Option(help="Ranks that take part.")],
    nodes: Annotated[int, typer.Option(help="Nodes that hold them, as many each.")] = 1,
    hardware: Annotated[
        str | None, typer.Option(help="Profile name, or a .toml file; default: this machine's.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Only this size, as 256MiB.")] = None,
) -> Result:
    """Explain what a collective costs, and by which algorithm.

    Formulas with their sources; by size, the algorithm that wins, its time and bus bandwidth.
    """
    from autopar.cli.collectives import SIZES_BYTES, cost_result

    sizes_bytes = SIZES_BYTES if size is None else (parse_bytes(size),)
    return cost_result(kind, ranks, nodes, hardware, sizes_bytes)


@app.command()
@prints_result
def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PROFILE.toml", help="Write it here.")
    ] = Path("profile.toml"),
    ranks: Annotated[
        str | None, typer.Option(metavar="N,N", help="Groups whose collectives are measured.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, a few times.")] = False,
) -> Result:
    """Measure this machine as a hardware profile.

    Products, memory-bound operators and the backend's collectives, in some three minutes; then
    plan with --hardware PROFILE.toml.
    """
    with progress("starting ranks") as report:
        from autopar.calibration import calibrate as measure

        groups = None if ranks is None else parse_counts(ranks)
        found = measure(groups, quick, report)
    found.save(output)
    note(f"saved {output}")
    return Result(found.text(), found.to_json() | {"saved": str(output)})


@app.command(cls=JsonMayNameFile)
@prints_result
def validate(
    runs: Annotated[
        Path | None, typer.Argument(metavar="RUNS.json", help="Default: those shipped.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="Write the JSON here; so does --json OUT."
        ),
    ] = None,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Predict each paper by a fit without it.")
    ] = False,
) -> Result:
    """Compare predictions with published runs.

    Step time, memory and order; fails where the shipped runs miss a target.
    """
    from autopar.cli.validate import check_output, validate_result

    if output is not None:
        check_output(output)
    with progress("reading the runs") as report:
        result = validate_result(runs, leave_one_out, report)
    if output is not None:
        output.write_text(to_json(result.data) + "\n")
        note(f"saved {output}")
    return result


@app.command()
@prints_result
def doctor() -> Result:
    """Check this machine.

    Versions, solvers, devices and backends, and a sum over two processes.
    """
    from autopar.cli.doctor import examine

    return examine()


def _not_built(name: str, purpose: str) -> None:
    def command(context: typer.Context) -> Result:
        raise NotSupportedError(
            f"`autopar {name}` is not supported yet",
            hint="`autopar plan` and `autopar explain` print what is predicted",
        )

    command.__doc__ = f"{purpose} (not supported yet)."
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, context_settings=settings)(prints_result(command))


for _name, _purpose in {
    "simulate": "Draw the timeline of a step",
    "compare": "Compare plans",
}.items():
    _not_built(_name, _purpose)


# -- plans -----------------------------------------------------------------------------------------


def _load(model: str, request: PlanRequest, *, real: bool = False) -> Subject:
    return load_subject(model, request.batch, request.seq, real=real)


def _plan(model: str, request: PlanRequest) -> Plan:
    """A new plan, with a progress bar that names the planner's phases."""
    mesh, options = request.machine(), request.options()
    with progress("loading the model") as report:
        subject = _load(model, request)
        from autopar.planning import plan as make_plan

        report("capturing")
        made = make_plan(subject.model, mesh, subject.example_inputs, progress=report, **options)
    return made


def _plan_of(subject: str, model: str | None, request: PlanRequest) -> Plan:
    """A saved plan laid on its model, or a new plan of a model."""
    if not is_plan_file(subject):
        if model is not None:
            raise OptionError(f"--model is for a plan file, and {subject} is a model")
        return _plan(subject, request)
    from autopar.planning import Plan

    assert model is not None
    _refuse_planning_flags(request)
    loaded = Plan.load(subject)
    found = _load(model, request)
    return loaded.bind(found.model)


def _refuse_planning_flags(request: PlanRequest) -> None:
    """A saved plan is decided: flags that would be ignored are refused."""
    given = [*request.given, *(k for k in ("mesh", "hardware") if getattr(request, k) is not None)]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise OptionError(f"a saved plan is decided: {flags}", hint="plan again with autopar plan")

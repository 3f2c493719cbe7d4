"""The commands of `autopar`. Each returns a `Result`; `autopar/cli/__init__.py` has exit codes."""

from __future__ import annotations

import gc
import math
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from autopar.caching import GC_EVERY
from autopar.cli.models import is_plan_file
from autopar.cli.options import (
    LossOption,
    PlanRequest,
    parse_counts,
    parse_mesh,
    takes_flags,
    takes_planning_options,
)
from autopar.cli.plans import (
    ModelOption,
    ModelOrPlan,
    load_model,
    load_plan,
    make_plan,
    plan_of,
    shell_model,
)
from autopar.cli.scaling import ScaleRequest, scale_flags
from autopar.cli.shell import (
    ErrorGroup,
    JsonMayNameFile,
    PanelledCommand,
    Result,
    note,
    prints_result,
    progress,
    to_json,
    writing,
)
from autopar.errors import OptionError
from autopar.option_values import parse_bytes

# Plain help: the same text in a terminal, a pipe and a golden file.
app = typer.Typer(
    cls=ErrorGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
command = partial(app.command, cls=PanelledCommand)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="package.module:factory, or a config.json.")
]


def main() -> None:
    """The entry of the `autopar` script.

    Garbage is collected rarely, since importing torch and transformers makes almost none: a fifth
    of the time of these imports is saved.
    """
    gc.set_threshold(GC_EVERY, *gc.get_threshold()[1:])
    app()


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        import autopar

        typer.echo(autopar.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Plan, explain and check how a PyTorch model is sharded over devices."""


@command()
@prints_result
@takes_planning_options
def plan(
    model: ModelArgument,
    request: PlanRequest,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Explain all of it, as autopar explain does.")
    ] = False,
) -> Result:
    """Choose how to run MODEL on a mesh, and say what it costs.

    docs/tutorials/read_a_plan.md explains what is printed.
    """
    from autopar.cli.summary import next_commands, plan_json

    made = make_plan(model, request)
    if output is not None:
        with writing():
            made.save(output)
        note(f"saved {output}")
    saved = None if output is None else str(output)
    same = made.command(shell_model(model, request))
    text = made.explain() if verbose else f"{made}\n{next_commands(same)}"
    return Result(text, lambda: plan_json(made) | {"saved": saved})


@command()
@prints_result
@takes_planning_options
def explain(
    subject: ModelOrPlan,
    request: PlanRequest,
    name: Annotated[str | None, typer.Argument(help="A parameter, operator or module.")] = None,
    model: ModelOption = None,
) -> Result:
    """Explain a plan, or one NAME in it.

    PLAN.json needs --model for costs; alone it gives placements. docs/tutorials/read_a_plan.md
    explains what is printed.
    """
    from autopar.cli.summary import data_json, data_text, plan_json

    if is_plan_file(subject) and model is None:
        data = load_plan(subject, request).data
        text = data_text(data, name)
        return Result(text, data_json(data) | {"text": text})
    made = plan_of(subject, model, request, "explain")
    text = made.explain(name)
    return Result(text, lambda: plan_json(made) | {"text": text})


@command()
@prints_result
@takes_planning_options
def passes(
    request: PlanRequest,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="MODEL|PLAN.json|PROGRAM.txt", help="What to compile."),
    ] = None,
    model: ModelOption = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="PASS,...", help="Passes to run on PROGRAM.txt (default: verify)."),
    ] = None,
) -> Result:
    """List the passes of the compilation.

    With MODEL or PLAN.json: what each took, and how much it made. AUTOPAR_PRINT_AFTER=PASS prints
    what a pass makes, in any command or script. PROGRAM.txt has what it prints after `lower`, or
    after `differentiate`: then the passes of --only run on that, and what they make is printed.
    """
    from autopar.cli.passes import list_result, ran_result, text_result

    if subject is None:
        return list_result()
    if subject.endswith(".txt"):
        return text_result(Path(subject), only)
    if only is not None:
        raise OptionError(
            "--only is for a program's text", hint="autopar passes PROGRAM.txt --only"
        )
    return ran_result(plan_of(subject, model, request, "passes"))


@command()
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
    made = plan_of(subject, model, request, "code")
    files, written = made.code(), []
    if output is not None:
        with writing():
            output.mkdir(parents=True, exist_ok=True)
            for name, source in files.items():
                (output / name).write_text(source, encoding="utf-8")
                written.append(str(output / name))
    text = "\n".join(written) if written else "\n".join(files.values()).rstrip("\n")
    return Result(text, {"files": files, "written": written})


@command()
@prints_result
@takes_planning_options
def report(
    subject: ModelOrPlan,
    request: PlanRequest,
    model: ModelOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE.html", help="Write the page here.")
    ] = Path("plan.html"),
    replan: Annotated[
        bool,
        typer.Option(help="Plan again with other options, other memory, and twice the nodes."),
    ] = True,
) -> Result:
    """Write a plan as an HTML page.

    One self-contained file, and the graph beside it as .dot. It says what the plan does, what
    limits it and what would help.
    """
    from autopar.cli.summary import plan_json

    made = plan_of(subject, model, request, "report")
    files = made.report(output, replan, shell_model(model or subject, request))
    written = [str(files.page), str(files.dot)]
    return Result("\n".join(written), plan_json(made) | {"written": written})


@command()
@prints_result
@takes_planning_options
def verify(model: ModelArgument, request: PlanRequest) -> Result:
    """Compare one sharded step with one process.

    Compares the loss and every gradient with the captured program, and that with the model itself;
    ranks are threads of this process. A config.json gets random weights and tokens.
    """
    mesh = request.machine()
    with progress("loading the model") as report:
        subject = load_model(model, request, real=True)
        from autopar.parity import verify as verify_model

        report("capturing")
        options = request.options() | {"progress": report, "loss_fn": subject.loss_fn}
        found = verify_model(subject.model, mesh, subject.example_inputs, **options)
    data = {
        "equal": found.ok, "worst": found.worst, "tolerance": found.tolerance,
        "errors": dict(found.errors), "capture_errors": dict(found.capture_errors),
        "capture_tolerance": found.capture_tolerance, "not_compared": found.not_compared,
        "stages": [dict(s.axes) for s in found.plan.stages],
        "chosen": found.plan.data.chosen,
    }  # fmt: skip
    # Show what was checked: equality of a plan that shards nothing proves little.
    header = "\n".join(found.plan.explain().split("\n\n")[:2])
    return Result(f"{found.text()}\n{header}", data, ok=found.ok)


@command()
@prints_result
def ops(
    model: ModelArgument,
    batch: Annotated[int | None, typer.Option(help="Rows of the global batch.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    loss: LossOption = None,
    mesh: Annotated[
        str | None, typer.Option(help="Also list parameter dims that its ranks cannot share.")
    ] = None,
    fallback: Annotated[
        str, typer.Option(help="Operators without a rule: error, or replicate.")
    ] = "error",
) -> Result:
    """List MODEL's operators with and without a sharding rule.

    Prints call counts, the source lines of operators without a rule, which operators are replaced
    by functions that communicate when they are sharded, and what capture froze, kept and replaced.
    """
    from autopar.cli.operators import BAD, operator_uses, ops_result, uneven_dims

    n_ranks = math.prod(parse_mesh(mesh)) if mesh is not None else 0
    with progress("loading the model") as report:
        from autopar.options import Options
        from autopar.passes.binding import capture_step

        subject = load_model(model, PlanRequest(mesh, None, batch, seq, loss))
        options = Options.of(fallback=fallback, loss_fn=subject.loss_fn)
        report("capturing")
        program = capture_step(subject.model, subject.example_inputs, options)
        uses = operator_uses(program, fallback)
        dims = None
        if n_ranks and not any(use.status in BAD for use in uses):
            replicated = [use.op for use in uses if use.status == "replicated"]
            dims = uneven_dims(program, n_ranks, replicated)
    return ops_result(uses, dims, n_ranks, program.audit)


@command()
@prints_result
@takes_flags("recipe", scale_flags)
@takes_planning_options
def simulate(
    subject: ModelOrPlan,
    request: PlanRequest,
    recipe: ScaleRequest,
    model: ModelOption = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="OUT", help="Draw the timeline, or the scaling.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="OUT", help="Write a Chrome trace.")
    ] = None,
    slow: Annotated[
        str | None, typer.Option(metavar="STAGE:FACTOR", help="Slow down one stage, as 1:1.5.")
    ] = None,
    jitter: Annotated[
        str | None, typer.Option(metavar="FRACTION:SEED", help="Slow compute at random, as 0.1:7.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=2x,KEY=VALUE", help="Change the machine's numbers. Repeatable."),
    ] = None,
    scale: Annotated[
        bool, typer.Option("--scale", help="Double each part's speed; without --mesh, add nodes.")
    ] = False,
) -> Result:
    """Simulate a training step, on this or another machine.

    A plan: where each stage spends its time, on the plan's machine, on a changed one (--what-if),
    and with each part twice as fast (--scale). A config.json with --scale and without --mesh: weak
    scaling of a recipe on 8 to 16,384 devices.
    """
    from autopar.cli.scaling import scale_config
    from autopar.cli.simulate import PlanPlay, simulate_plan

    play = PlanPlay(slow, jitter, trace, model)
    if scale and not is_plan_file(subject) and request.mesh is None:
        play.refuse()
        return scale_config(subject, request, recipe, what_if or (), svg)
    recipe.refuse()
    return simulate_plan(subject, request, play, what_if or (), scale, svg)


@command()
@prints_result
@takes_planning_options
def compare(
    subjects: Annotated[list[str], typer.Argument(metavar="MODEL|PLAN.json", help="Two or more.")],
    request: PlanRequest,
    model: ModelOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PAGE.html", help="Write an HTML page.")
    ] = None,
) -> Result:
    """Compare plans side by side.

    Shows costs, collectives, and which placements differ. Saved plans need --model for costs.
    """
    from autopar.cli.compare import compare_result

    return compare_result(subjects, model, request, output)


@command()
@prints_result
def cost(
    kind: Annotated[str, typer.Argument(metavar="COLLECTIVE", help="all_reduce, all_gather ...")],
    ranks: Annotated[int, typer.Option(help="Ranks of the collective.")],
    nodes: Annotated[int, typer.Option(help="Nodes, with equally many ranks each.")] = 1,
    hardware: Annotated[
        str | None, typer.Option(help="Profile name, or a .toml file; default: this machine's.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Only this size, as 256MiB.")] = None,
) -> Result:
    """Explain what a collective costs, and by which algorithm.

    Prints formulas with their sources and, by size, the fastest algorithm, its time and bus
    bandwidth.
    """
    from autopar.cli.collectives import SIZES_BYTES, cost_result

    sizes_bytes = SIZES_BYTES if size is None else (parse_bytes(size),)
    return cost_result(kind, ranks, nodes, hardware, sizes_bytes)


@command()
@prints_result
def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PROFILE.toml", help="Write it here.")
    ] = Path("profile.toml"),
    ranks: Annotated[
        str | None, typer.Option(metavar="N,N", help="Sizes of groups to measure.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions.")] = False,
) -> Result:
    """Measure this machine as a hardware profile.

    Times matmuls, memory-bound operators, the backend's collectives and, on a CPU, whole training
    steps. Takes about three minutes. Then plan with --hardware PROFILE.toml.
    """
    with progress("starting ranks") as report:
        from autopar.calibration import calibrate as measure

        groups = None if ranks is None else parse_counts(ranks)
        found = measure(groups, quick, report)
    found.save(output)
    note(f"saved {output}")
    return Result(found.text(), found.to_json() | {"saved": str(output)})


@command(cls=JsonMayNameFile)
@prints_result
def validate(
    runs: Annotated[
        Path | None, typer.Argument(metavar="RUNS.json", help="Default: the shipped runs.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="Write the JSON here; so does --json OUT."
        ),
    ] = None,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Predict each paper with a fit to the others.")
    ] = False,
) -> Result:
    """Compare predictions with published runs.

    Compares step time, memory and order. Fails if the shipped runs miss a target.
    """
    from autopar.cli.validate import check_output, validate_result

    if output is not None:
        check_output(output)
    with progress("reading the runs") as report:
        result = validate_result(runs, leave_one_out, report)
    if output is not None:
        output.write_text(to_json(result.facts()) + "\n")
        note(f"saved {output}")
    return result


@command()
@prints_result
def convert(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A checkpoint you trust.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Write it here.")],
) -> Result:
    """Convert an old checkpoint.

    Takes one of autopar 0.3 or of torch.distributed.checkpoint.
    Their metadata are a pickle, which autopar.load does not read. This reads it with an unpickler
    that makes nothing but such metadata.
    """
    from autopar.runtime.checkpoints import convert as converted

    found = converted(old.absolute(), new.absolute())
    left_out = ", ".join(found.left_out)
    text = f"{found.n_tensors} tensors of {old} are in {new}"
    return Result(
        text + (f"; left out, because they are pickles: {left_out}" if left_out else ""),
        {"tensors": found.n_tensors, "left_out": list(found.left_out), "saved": str(new)},
    )


@command()
@prints_result
def diagnose(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="AUTOPAR_FLIGHT_DIR of the job, of each host."),
    ],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="How many ranks there were; default: those in DIR.")
    ] = None,
) -> Result:
    """Say what every rank did last.

    Reads the notes that the ranks of a job left in the folder AUTOPAR_FLIGHT_DIR, also while the
    job runs. Names the ranks that are behind the others. With several hosts, copy their folders
    to one and give all of them.
    """
    from autopar.cli.diagnose import diagnose_result

    return diagnose_result(folders, ranks)


@command()
@prints_result
def doctor() -> Result:
    """Check this machine.

    Checks versions, solvers, devices and backends, and runs an all_reduce over two processes.
    """
    from autopar.cli.doctor import examine

    return examine()

"""Planning: from a model, a mesh and options to a `Plan` one can read, edit and run.

A `Plan` is its data (plan_data.py) bound to a captured program; what it predicts is computed from
the bound program, never read from a file. `Plan.load` gives unbound data; `bind` it to the
model to cost, print or run it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture import capture
from autopar.codegen import emit, file_name
from autopar.collective import Collective
from autopar.cost.hardware import Hardware, resolve
from autopar.cost.model import CostModel
from autopar.cost.predict import collectives_of, predict
from autopar.errors import NotSupportedError, OptionError, PlanError
from autopar.mesh import Device, Link, LogicalMesh, Mesh, factored_view
from autopar.options import Options
from autopar.passes.intra_op import Analysis
from autopar.passes.lower import lower
from autopar.passes.planner import Planner, compute_dtype
from autopar.passes.replay import plan_texts, replay
from autopar.plan_data import InputSignature, MeshRecord, PlanData, parse_storage
from autopar.predicted import Predicted
from autopar.program import Program, flatten_inputs
from autopar.report import ReportFiles, dot, explain, write_report
from autopar.stage_program import StageProgram
from autopar.verifier import verify_program

ExampleInputs = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its part of the machine, and what runs on it."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    axes: Mapping[str, int]


@dataclass(frozen=True)
class Bound:
    """A plan laid on a captured program: everything that can be computed from it."""

    analysis: Analysis
    mesh: LogicalMesh
    hardware: Hardware
    cost: CostModel
    program: StageProgram
    predicted: Predicted


@dataclass(frozen=True)
class Plan:
    """A parallel plan. `data` is what `save` writes; `bound` is None for a loaded plan."""

    data: PlanData
    bound: Bound | None = field(default=None, repr=False, compare=False)

    # -- what was decided ----------------------------------------------------------------------

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages, first to last."""
        modules = dict.fromkeys(key.rpartition("/")[0] for key in self.data.operators)
        n_ranks = Mesh(self.data.mesh.shape).n_ranks
        return (
            Stage(
                self.data.mesh.shape,
                tuple(range(n_ranks)),
                tuple(m for m in modules if m),
                dict(self.data.axes),
            ),
        )

    @cached_property
    def placements(self) -> dict[str, tuple[str, ...]]:
        """Parameter -> stored placement on each logical axis: `("I", "S(0)")`."""
        return {
            name: tuple(str(p) for p in parse_storage(text, name).spec.placements)
            for name, text in self.data.parameters.items()
        }

    @cached_property
    def uses(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Parameter -> operator -> placement in use on each logical axis."""
        bound = self._bound("uses")
        program = bound.analysis.program
        out: dict[str, dict[str, tuple[str, ...]]] = {
            info.name: {} for info in program.parameters.values()
        }
        strategy = replay_plan(bound.analysis, self.data, bound.mesh)
        for operator in bound.analysis.operators:
            chosen = strategy.operators[operator.name]
            for value, spec in zip(operator.inputs, chosen.inputs, strict=True):
                if value in program.parameters:
                    key = program.keys[operator.name]
                    placements = tuple(str(p) for p in spec.placements)
                    out[program.parameters[value].name][key] = placements
        return out

    @property
    def microbatches(self) -> int:
        return self.data.microbatches

    @property
    def objective_s(self) -> float:
        """What the solver minimised, seconds per step."""
        return self.data.objective_s

    @property
    def gap(self) -> float:
        """Proven relative distance of `objective_s` from the optimum."""
        return self.data.gap

    # -- what follows from it ------------------------------------------------------------------

    @property
    def predicted(self) -> Predicted:
        """Step time, memory and communication, from the bound program."""
        return self._bound("predicted").predicted

    def collectives(self) -> list[Collective]:
        """Every collective of one step."""
        return list(collectives_of(self._bound("collectives()").program, self.data.optimizer))

    def code(self) -> dict[str, str]:
        """File name -> generated source."""
        return {file_name(0): emit(self._bound("code()").program)}

    def explain(self, name: str | None = None) -> str:
        """The plan in words; with a parameter or operator name, that one."""
        bound = self._bound("explain()")
        return explain(self.data, bound.program, bound.predicted, self.collectives(), name)

    def to_dot(self) -> str:
        """The plan as a Graphviz graph."""
        return dot(self.data.model, [self._bound("to_dot()").program])

    def report(self, path: str | Path) -> ReportFiles:
        """Write the plan as one HTML page, and its graph beside it as `.dot`.

        The page has the picture where the program `dot` is installed, else it says how to
        install it. Raises `OptionError` where `path` cannot be written.
        """
        bound = self._bound("report(path)")
        return write_report(path, self.data, [bound.program], bound.predicted, self.collectives())

    def simulate(self) -> Any:
        """The timeline of a step: not built yet."""
        raise _not_built("plan.simulate()", "plan.predicted and plan.collectives()")

    def __str__(self) -> str:
        return self.explain() if self.bound else f"unbound plan of {self.data.model}"

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        self.data.save(path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan; it is unbound until it meets its model. Raises `PlanError`."""
        return Plan(PlanData.load(path))

    def bind(
        self,
        model: nn.Module,
        mesh: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
    ) -> Plan:
        """Lay a loaded plan on its model, check it, and compute its costs anew.

        Raises `PlanError` when the graph or the mesh is another one, or a placement is not
        legal.
        """
        machine = Mesh.of(mesh) if mesh is not None else mesh_of(self.data.mesh)
        check_mesh(self.data, machine)
        program = capture(
            model, example_of(self.data), precision=self.data.precision, loss_fn=loss_fn
        )
        analysis = Analysis.of(program, self.data.batch_dims)
        return bind(self.data, analysis, machine)

    def _bound(self, what: str) -> Bound:
        if self.bound is None:
            raise PlanError(
                f"{what} needs the model, and this plan was only loaded",
                hint="plan.bind(model), or pass it to autopar.parallelize(model, mesh, plan=plan)",
            )
        return self.bound


def _not_built(what: str, instead: str) -> NotSupportedError:
    return NotSupportedError(f"{what} is not built yet", hint=f"read {instead}")


def compare(*plans: Plan) -> Any:
    """Plans side by side: not built yet."""
    raise _not_built("autopar.compare", "plan.explain() of each: it lists the alternatives")


def plan(model: nn.Module, mesh: Any, example_inputs: ExampleInputs, **options: Any) -> Plan:
    """Choose how to run `model` on `mesh`; needs no devices and no weights.

    example_inputs: one global batch, a dict of keyword inputs or a tuple of positional ones;
    meta or fake tensors will do. Options: see `autopar.options.Options`.

    Raises `CaptureError`, `MissingRuleError`, `InfeasibleError`, `OptionError`,
    `NotSupportedError`, each with a way out.
    """
    checked = Options.of(**options)
    machine = Mesh.of(mesh)
    program = capture(model, example_inputs, precision=checked.precision, loss_fn=checked.loss_fn)
    return plan_program(program, machine, example_inputs, checked)


def plan_program(
    program: Program, mesh: Mesh, example_inputs: ExampleInputs, options: Options
) -> Plan:
    """`plan`, for a program that is already captured."""
    analysis = Analysis.of(program, options.batch_dims or None)
    report = options.progress if callable(options.progress) else lambda text: None
    planner = Planner(analysis, mesh, options, predicted_time_s, report)
    outcome = planner.run()
    parameters, operators = plan_texts(analysis, outcome.chosen.strategy)
    inputs, static = signature_of(program, example_inputs)
    data = PlanData(
        model=program.model_name,
        graph_hash=program.hash(),
        mesh=record_of(mesh, outcome.hardware),
        axes=outcome.mesh.axes,
        microbatches=outcome.chosen.strategy.n_microbatches,
        precision=options.precision,
        optimizer=options.optimizer,
        schedule="1f1b",
        inputs=inputs,
        static_inputs=static,
        positional=not isinstance(example_inputs, Mapping),
        batch_dims=dict(options.batch_dims or {}),
        forbid=tuple(sorted(outcome.forbid)),
        parameters=parameters,
        operators=operators,
        objective_s=outcome.chosen.objective_s,
        gap=outcome.chosen.gap,
        chosen=outcome.name,
        alternatives=outcome.alternatives,
    )
    return bind(data, analysis, mesh)


def predicted_time_s(program: StageProgram, cost: CostModel, optimizer: str) -> float:
    return predict(program, cost, optimizer).step_time_s


def replay_plan(analysis: Analysis, data: PlanData, view: LogicalMesh) -> Any:
    return replay(
        analysis, data.parameters, data.operators, view.sizes, data.microbatches, data.forbid
    )


def bind(data: PlanData, analysis: Analysis, mesh: Mesh) -> Plan:
    """Lay plan data on an analysed program; verified before anything runs."""
    if data.graph_hash != analysis.program.hash():
        raise PlanError(
            f"the plan was made for graph {data.graph_hash} of {data.model}, "
            f"this model gives {analysis.program.hash()}",
            hint="same model, mode, input shapes, precision and versions; or plan again",
        )
    hardware = resolve(mesh, compute_dtype(analysis))
    view = factored_view(mesh, hardware.links, hardware.device, data.axes)
    if tuple(data.axes.values()) == mesh.shape:
        view = replace(view, links=hardware.links)
    cost = CostModel(view, compute_dtype(analysis))
    program = lower(analysis, replay_plan(analysis, data, view), cost)
    verify_program(program)
    integers = [i for i in data.inputs if i.dtype.startswith("int") and len(i.shape) == 2]
    tokens = max((math.prod(i.shape) for i in integers), default=0)
    predicted = predict(
        program, cost, data.optimizer,
        peak_flops_per_s=hardware.peak_flops_per_s,
        n_samples=analysis.batch.size or None, n_tokens=tokens or None,
    )  # fmt: skip
    return Plan(data, Bound(analysis, view, hardware, cost, program, predicted))


# -- inputs and meshes as data ---------------------------------------------------------------------


def signature_of(
    program: Program, example_inputs: ExampleInputs
) -> tuple[tuple[InputSignature, ...], dict[str, Any]]:
    """Tensor inputs by path, and the other leaves, which the graph has baked in."""
    tensors = tuple(
        InputSignature(i.path, i.shape, str(i.dtype).removeprefix("torch."))
        for i in program.inputs.values()
    )
    static: dict[str, Any] = {}
    for path, leaf in flatten_inputs(example_inputs).items():
        if isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, (bool, int, float, str, type(None))):
            raise OptionError(f"input {path} is a {type(leaf).__name__}, which a plan cannot keep")
        static[path] = leaf
    return tensors, static


def example_of(data: PlanData) -> ExampleInputs:
    """Meta tensors like the inputs a plan was made with."""
    leaves: dict[str, Any] = {
        i.path: torch.empty(i.shape, dtype=_dtype(i), device="meta") for i in data.inputs
    }
    leaves.update(data.static_inputs)
    if has_nested_inputs(data):
        raise PlanError(
            "the plan has nested inputs, which it cannot rebuild",
            hint="pass example_inputs as well",
        )
    if data.positional:
        return tuple(leaves[str(i)] for i in range(len(leaves)))
    return leaves


def has_nested_inputs(data: PlanData) -> bool:
    return any("." in path for path in (*(i.path for i in data.inputs), *data.static_inputs))


def _dtype(signature: InputSignature) -> torch.dtype:
    dtype = getattr(torch, signature.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"input {signature.path}: {signature.dtype!r} is no dtype of torch")
    return dtype


def check_mesh(data: PlanData, mesh: Mesh) -> None:
    """Refuse a mesh of another shape than the plan's; warn of other hardware."""
    if data.mesh.shape != mesh.shape:
        raise PlanError(
            f"the plan was made for a mesh {data.mesh.shape}, this one is {mesh.shape}",
            hint="use the plan's mesh shape, or plan again",
        )
    if mesh.hardware is not None and data.mesh.hardware != mesh.hardware:
        warnings.warn(
            f"the plan was made for {data.mesh.hardware}; it runs on {mesh.hardware}, "
            "where another plan may be faster",
            stacklevel=3,
        )


def record_of(mesh: Mesh, hardware: Hardware) -> MeshRecord:
    assert mesh.axis_names is not None
    device = hardware.device
    return MeshRecord(
        mesh.shape,
        mesh.axis_names,
        hardware.profile_name,
        tuple((k.latency_s, k.s_per_byte) for k in hardware.links),
        {
            "flops_per_s": device.flops_per_s,
            "bytes_per_s": device.bytes_per_s,
            "memory_bytes": device.memory_bytes,
            "launch_s": device.launch_s,
        },
    )


def mesh_of(record: MeshRecord) -> Mesh:
    if record.hardware != "explicit":
        return Mesh(record.shape, record.axis_names, hardware=record.hardware)
    links = [Link(a, b) for a, b in record.links]
    return Mesh(record.shape, record.axis_names, links=links, device=Device(**record.device))

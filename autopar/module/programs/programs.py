"""All programs of one module: for each mode, each kind of call and each batch, captured when asked.

Every one is a graph of its own on which the one plan is placed (`passes/pipeline.py`). The first is
the one that was planned. What decides which program a call runs: `signatures.py` (the batch) and
`variants.py` (Python values in the graph).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from autopar.capture import accumulation_of, capture, first_rows
from autopar.errors import CaptureError, NotSupportedError, PlanError
from autopar.module.agreement import Fingerprint, Given, agreed_program, fingerprints
from autopar.module.job import from_rank_0, own_rank
from autopar.module.programs.compiled_step import TRAINS, Built, Kind, Links
from autopar.module.programs.row_counts import microbatch_scales
from autopar.module.programs.signatures import (
    refuse_empty,
    refuse_unlike,
    signature_of_call,
    warn_of_unread,
)
from autopar.module.programs.variants import Variants
from autopar.passes.binding import planned_accumulation, planned_row_dims
from autopar.passes.compilation import Compilation
from autopar.passes.facts import EvaluationStages, Placed, Target, Trained
from autopar.passes.pipeline import evaluation, other_shapes
from autopar.planning import Bound
from autopar.precision import Precision
from autopar.program.graph import Program


@dataclass(frozen=True)
class Programs:
    """The programs of one module on this rank.

    target         the mesh and the options of the plan
    buffers        the module's buffers, by name; programs write those that they change
    live_buffers   names of the buffers that the planned step changes
    planned        the form of the planned batch
    weights        where values of the model come from: "rank0", "init" or a path
    number         of the module, the same on every rank
    is_written     have parameters of the model been written to since the module copied them?
    dtypes         of the model's parameters when it was planned, by name
    """

    model: nn.Module
    target: Target
    bound: Bound
    links: Links
    buffers: Mapping[str, Tensor]
    live_buffers: frozenset[str]
    planned: Mapping[str, Fingerprint]
    weights: str
    number: int
    is_written: Callable[[], bool]
    variants: Variants = field(init=False)
    dtypes: Mapping[str, torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        loss_fn = self.target.options.loss_fn
        made = Variants(self.model, loss_fn, self.number, self.is_written)
        object.__setattr__(self, "variants", made)
        dtypes = {name: p.dtype for name, p in self.model.named_parameters()}
        object.__setattr__(self, "dtypes", dtypes)

    @property
    def modes(self) -> Mapping[str, bool]:
        """The mode of each part of the model when it was planned."""
        return self.bound.analysis.program.frozen.modes

    def add_planned(self, batch: Given, program: Program) -> None:
        """Compile the program that was planned; `batch` is the planned one."""
        built = Built.of(self.bound.compilation, self.links, self.buffers)
        signature = signature_of_call(batch, self.target.options.precision)
        self.variants.add((True, "step", signature), program, built)

    def get(self, batch: Given, kind: Kind, training: bool) -> Built:
        """The compiled program for a mode and a batch; captures it if there is none."""
        signature = signature_of_call(batch, self.target.options.precision)
        key = (training, kind, signature)
        is_new = self.variants.captures.is_new(signature)
        if is_new:
            refuse_empty(batch)
            forms = fingerprints(batch, with_content=False)
            other = {path: f.form for path, f in forms.items() if self.planned.get(path) != f}
            self.variants.agree_on_shapes(other)

        def compiled(program: Program) -> Built:
            scales = self._scales(program, batch) if kind == "step with outputs" else ()
            compilation = self._placed(program, kind)
            return Built.of(compilation, self.links, self.buffers, scales)

        try:
            built = self.variants.current(
                key, lambda: self._captured(batch, kind, training), compiled
            )
        except (CaptureError, PlanError) as error:
            raise refuse_unlike(error, self.model, self.planned, batch) from error
        if is_new and own_rank() == 0:
            self.variants.captures.announce(signature, batch)
        return built

    def lifted(self, batch: Given, buffers: Mapping[str, Tensor]) -> Built:
        """A training step of this plan with every float as float64; it is not kept.

        `buffers` are those that it changes, in float64.
        """
        precision = self.target.options.dtypes.lifted()
        compilation = self._placed(self._captured(batch, "step", True, precision), "step")
        return Built.of(compilation, self.links, buffers)

    def for_buffers(self, buffers: Mapping[str, Tensor]) -> Programs:
        """The same programs for a copy of the module, which has other `buffers`."""
        twin = replace(self, buffers=buffers)
        made = self.variants.for_buffers(lambda built: built.for_buffers(self.links, buffers))
        object.__setattr__(twin, "variants", made)
        object.__setattr__(twin, "dtypes", self.dtypes)
        return twin

    def _captured(
        self, batch: Given, kind: Kind, training: bool, precision: Precision | None = None
    ) -> Program:
        """The graph of a batch; `precision` overrules the options."""
        options, data = self.target.options, self.bound.data
        if precision is None:
            self._refuse_other_dtypes()
        loss_fn = None if kind == "forward" else options.loss_fn
        program = capture(
            self.model, batch, training=training, precision=precision or options.dtypes,
            loss_fn=loss_fn, live_buffers=self.live_buffers,
            accumulation=planned_accumulation(data, batch) if kind in TRAINS else None,
            modes=self._modes_now() if training else None,
        )  # fmt: skip
        if loss_fn is not None:
            warn_of_unread(program, self.model, batch)
        for buffer in program.buffers.values():
            if buffer.name not in self.live_buffers:
                raise NotSupportedError(
                    f"buffer `{buffer.name}` changes here, and not in the step that was planned",
                    hint="change it in every mode and for all shapes, or never",
                )
        return program

    def _refuse_other_dtypes(self) -> None:
        """Raise `NotSupportedError` if `model.half()` or the like came after the planning."""
        for name, parameter in self.model.named_parameters():
            planned = self.dtypes.get(name, parameter.dtype)
            if parameter.dtype != planned:
                raise NotSupportedError(
                    f"the model was changed after autopar.parallelize: `{name}` of the original is "
                    f"{parameter.dtype}, and was planned as {planned}; a batch or mode that has no "
                    "program yet would be captured in that dtype",
                    hint=f"convert a copy.deepcopy(model) instead, and this one back: "
                    f"model.to({planned})",
                )

    def _modes_now(self) -> Mapping[str, bool] | None:
        """The modes to capture with: the planned ones after the user called `model.eval()`."""
        modes = self.modes
        return modes if modes and self.model.training != modes[""] else None

    def _scales(self, program: Program, batch: Given) -> tuple[float, ...]:
        """The factors of the outputs of a microbatch, from the graph of one microbatch."""
        data = self.bound.data
        one = None
        if program.accumulation is None and data.microbatches > 1:
            parts = accumulation_of(batch, data.microbatches, planned_row_dims(data))
            with contextlib.suppress(CaptureError):  # a model of a fixed batch size
                one = self._captured(first_rows(batch, parts), "step", True)
        return microbatch_scales(program, one, data.microbatches)

    def _placed(self, program: Program, kind: Kind) -> Compilation:
        """The plan placed on another program: other shapes, with outputs, or evaluation."""
        bound = self.bound
        agreed = agreed_program(program, self.weights, self.links.device)
        given = self.target, bound.data, agreed
        if kind in TRAINS:
            passes = other_shapes(bound.pipeline.n_blocks, kind == "step with outputs")
            return Compilation(passes, *given)
        trained = Trained(Placed(bound.stages), bound.pipeline)
        compilation = Compilation(evaluation(kind == "forward"), *given, trained)
        stages = from_rank_0(lambda: compilation[EvaluationStages])
        if EvaluationStages not in compilation:
            compilation.give(stages)
        return compilation

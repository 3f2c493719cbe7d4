"""Faults planted in the code that joins stages: tests of pipelines must notice each of them.

A fault is noticed if a step that is right without it has an error above the tolerance with it, or
raises `VerificationError`. Each fault is a mistake that is easy to make with stages.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.capture.reference import reference_step
from autopar.errors import VerificationError
from autopar.mesh import LogicalMesh
from autopar.passes.analysis import Analysis
from autopar.placement import Spec
from autopar.program import Local, Pipeline, Slice, cross_mesh, most_batch_shards
from autopar.runtime.collectives import Crossings, TiedGradients
from autopar.runtime.execute import Executor
from autopar.schedule import Action
from tests.helpers.harness import generated_code, model_case
from tests.helpers.models.pipeline_models import Skip, Tied, analysis_of, batch_of
from tests.helpers.pipeline_harness import Layout, Shapes, ends_before, random_pipeline
from tests.helpers.ranks import (
    TOLERANCE,
    Batch,
    Rank,
    compare_with,
    gradient_of,
    named_inputs,
    pipeline_step,
    random_parameters,
    run_ranks,
)

__all__ = ["generated_code"]

PAIR: Shapes = ((1, 2), (1, 1))


class Steps:
    """A few random assignments of one cut, run with and without a fault."""

    def __init__(
        self, analysis: Analysis, batch: Batch, modules: str, layout: Layout, n_seeds: int = 3
    ) -> None:
        self.analysis, self.batch = analysis, batch
        ends = ends_before(analysis.program, *modules.split())
        self.pipelines = [
            random_pipeline(analysis, ends, layout, random.Random(seed)) for seed in range(n_seeds)
        ]
        assert all(self.worst(pipeline) <= TOLERANCE for pipeline in self.pipelines)

    def worst(self, pipeline: Pipeline) -> float:
        errors, _ = pipeline_step(self.analysis.program, pipeline, self.batch, 0)
        return max(errors.values())

    def notice(self) -> bool:
        return any(self._notices(pipeline) for pipeline in self.pipelines)

    def _notices(self, pipeline: Pipeline) -> bool:
        try:
            return not self.worst(pipeline) <= TOLERANCE
        except VerificationError:
            return True


def skips(shapes: Shapes = ((1, 2), (1, 1), (2, 1), (1, 1))) -> Steps:
    return Steps(analysis_of(Skip), batch_of(Skip, 0), "b c d", Layout(shapes, 2))


def chain(shapes: Shapes, n_microbatches: int = 2, n_seeds: int = 3) -> Steps:
    case = model_case("mlp")
    layout = Layout(shapes, n_microbatches)
    return Steps(case.analysis, case.batch(0), "net.2", layout, n_seeds)


def ties() -> Steps:
    layout = Layout(((1, 2), (1, 1), (2, 1), (1, 1)), 2)
    return Steps(analysis_of(Tied), batch_of(Tied, 0), "b c d", layout)


def test_values_of_a_message_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of equal shape and dtype are swapped; only their values tell them apart."""
    some = skips(((1, 1),) * 4)
    right = Crossings._sends

    def swapped(
        self: Crossings, action: Action, values: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, int]]:
        out = right(self, action, values)
        if len(out) > 1 and out[0][0].dtype == out[-1][0].dtype:
            out[0], out[-1] = out[-1], out[0]
        return out

    monkeypatch.setattr(Crossings, "_sends", swapped)
    assert some.notice()


def test_slices_put_together_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of one rank are put where those of another belong."""
    some = chain(((2, 1), (1, 1)))
    right = Crossings._assembled

    def shuffled(self: Crossings, local: Any, shape: Any, pieces: Sequence[Any]) -> Tensor:
        places, tensors = [s for s, _ in pieces], [x for _, x in pieces]
        return right(self, local, shape, list(zip(places, tensors[::-1], strict=True)))

    monkeypatch.setattr(Crossings, "_assembled", shuffled)
    assert some.notice()


def test_gradient_of_a_second_reader_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    some = skips()
    right = Crossings.arrived

    def first_only(self: Crossings, action: Action) -> dict[str, Tensor]:
        values = right(self, action)
        if action.kind == "recv_backward" and action.peer != action.stage + 1:
            return {name: torch.zeros_like(value) for name, value in values.items()}
        return values

    monkeypatch.setattr(Crossings, "arrived", first_only)
    assert some.notice()


def every_rank_owns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks along an axis of `kind` take part in crossings, instead of the first alone."""
    right = cross_mesh._slices
    Dims = tuple[tuple[int, ...], ...]

    def alike(dims: Dims, spec: Spec, mesh: LogicalMesh, owner: int) -> list[int]:
        if all(p.kind != kind for p in spec.placements):
            return [owner]
        boxes = {r: cross_mesh._box(dims, spec, mesh.sizes, mesh.coordinate(r)) for r in mesh.ranks}
        return [r for r, box in boxes.items() if box == boxes[owner]]

    def slices(
        dims: Dims, source: Spec, source_mesh: LogicalMesh, target: Spec, target_mesh: LogicalMesh
    ) -> tuple[Slice, ...]:
        return tuple(
            replace(piece, source_rank=sender, target_rank=receiver)
            for piece in right(dims, source, source_mesh, target, target_mesh)
            for sender in alike(dims, source, source_mesh, piece.source_rank)
            for receiver in alike(dims, target, target_mesh, piece.target_rank)
        )

    monkeypatch.setattr(cross_mesh, "_slices", slices)


def test_every_rank_sends_what_all_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor does not divide over three ranks: it leaves R, and three gradients come back."""
    some = chain(((1, 3), (1, 1)))
    every_rank_owns("R", monkeypatch)
    assert some.notice()


def test_every_rank_receives_a_summand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor does not divide over three ranks: it arrives P, three times, and is summed."""
    some = chain(((1, 1), (1, 3)))
    every_rank_owns("P", monkeypatch)
    assert some.notice()


def test_ties_without_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    some = ties()
    monkeypatch.setattr(TiedGradients, "sum", lambda self, stored, kept: None)
    assert some.notice()


def test_sums_over_ties_that_are_summed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of an earlier step is not set aside, so it is added once per stage."""
    some = ties()
    program, (pipeline, *_) = some.analysis.program, some.pipelines

    def worst() -> float:
        parameters = random_parameters(program, 0)
        for _ in range(2):
            loss, _ = reference_step(program, parameters, some.batch)
            assert loss is not None
            loss.backward()

        def work(rank: Rank) -> dict[str, Tensor]:
            for _ in range(2):
                rank.executor.step(rank.stored, named_inputs(program, some.batch))
            return {name: gradient_of(p) for name, p in rank.stored.items()}

        found = run_ranks(program, pipeline, parameters, work)
        expected = {name: gradient_of(p) for name, p in parameters.items()}
        return max(compare_with(pipeline, found, expected).values())

    assert worst() <= TOLERANCE
    monkeypatch.setattr(
        TiedGradients, "detach_earlier", lambda self, stored: dict.fromkeys(stored, None)
    )
    assert worst() > TOLERANCE


def test_rows_dealt_by_each_stage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages with two data ranks and with one take different rows for the same microbatch."""
    some = chain(((2, 1), (1, 1)), n_seeds=6)
    assert {pipeline.n_blocks for pipeline in some.pipelines} == {1, 2}
    right = Executor._part

    def own_blocks(self: Executor, *args: Any) -> Tensor:
        whole = self.pipeline
        blocks = most_batch_shards(self.program.delivered, self.program.axis_sizes)
        self.pipeline = Pipeline(
            whole.stages, whole.meshes, whole.schedule, whole.crossings, whole.ties, blocks
        )
        try:
            return right(self, *args)
        finally:
            self.pipeline = whole

    monkeypatch.setattr(Executor, "_part", own_blocks)
    assert some.notice()


def test_every_rank_of_the_last_stage_tells_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    some = chain(((1, 1), (1, 2)))
    right = Executor._from_last_stage

    def told(self: Executor, value: Tensor | None, made: Local) -> Tensor:
        self._is_loss_source = value is not None
        return right(self, value, made)

    monkeypatch.setattr(Executor, "_from_last_stage", told)
    assert some.notice()

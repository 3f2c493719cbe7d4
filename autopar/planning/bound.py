"""A plan bound to its program: a view of its compilation.

Costs are computed from the program, never read from a plan. The program is lowered on first use.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.hardware import Hardware, resolve
from autopar.cost.laws import CostModel
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, compute_dtype
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Placed, Sources, Target
from autopar.passes.lowering import PlacedStage
from autopar.passes.pipeline import PASSES
from autopar.plans import PlanData, Predicted
from autopar.program import Pipeline


@dataclass(frozen=True)
class Bound:
    """Everything that can be computed from a plan and its program."""

    compilation: Compilation

    @property
    def data(self) -> PlanData:
        return self.compilation[PlanData]

    @property
    def mesh(self) -> Mesh:
        return self.compilation[Target].mesh

    @property
    def analysis(self) -> Analysis:
        return self.compilation[Analysis]

    @property
    def stages(self) -> tuple[PlacedStage, ...]:
        return self.compilation[Placed].stages

    @property
    def hardware(self) -> Hardware:
        return resolve(self.mesh, compute_dtype(self.analysis))

    @property
    def costs(self) -> list[CostModel]:
        return [stage.cost for stage in self.stages]

    @property
    def pipeline(self) -> Pipeline:
        """The stages lowered, joined and verified."""
        return self.compilation[Pipeline]

    @property
    def predicted(self) -> Predicted:
        return self.compilation[Predicted]

    @property
    def sources(self) -> dict[str, str]:
        """File name -> generated source."""
        return self.compilation[Sources].files


def bind(
    data: PlanData,
    analysis: Analysis,
    mesh: Mesh,
    stages: tuple[PlacedStage, ...] | None = None,
) -> Bound:
    """Place a plan on an analysed program, or take `stages` that are placed already.

    Raises `PlanError` if the plan is for another graph, or is not legal on this one.
    """
    placed = () if stages is None else (Placed(stages),)
    compilation = Compilation(PASSES, Target(mesh, Options()), data, analysis, *placed)
    _ = compilation[Placed]
    return Bound(compilation)

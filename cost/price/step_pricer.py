"""Prices of steps: the lines of a pipeline are priced, and its schedule is simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.cost.price.prediction import link_between, predict, timeline_of
from autopar.cost.simulate import Timeline
from autopar.mesh import Mesh
from autopar.plans import InputSignature, Predicted
from autopar.program.lines import Pipeline


@dataclass(frozen=True)
class StepPricer:
    """Prices any pipeline of one program on one machine.

    `n_samples` and `n_tokens` are those of a global batch; None if not known.
    """

    mesh: Mesh
    hardware: Hardware
    optimizer: str
    n_samples: int | None = None
    n_tokens: int | None = None

    @staticmethod
    def of(
        mesh: Mesh, hardware: Hardware, optimizer: str, n_samples: int,
        inputs: Sequence[InputSignature],
    ) -> StepPricer:  # fmt: skip
        """`inputs` are one global batch of `n_samples` rows (0: not known); its tokens are its
        largest 2-d tensor of integers."""
        integers = [i for i in inputs if i.dtype.startswith("int") and len(i.shape) == 2]
        n_tokens = max((math.prod(i.shape) for i in integers), default=0)
        return StepPricer(mesh, hardware, optimizer, n_samples or None, n_tokens or None)

    def __call__(self, pipeline: Pipeline, costs: Sequence[CostModel]) -> Predicted:
        """The prediction of a step; `costs` are the cost models of the stages."""
        return predict(
            pipeline, costs, self.optimizer, link_between(self.mesh, self.hardware.links),
            peak_flops_per_s=self.hardware.peak_flops_per_s,
            n_samples=self.n_samples, n_tokens=self.n_tokens,
            interval_ratio=self.hardware.interval_ratio,
        )  # fmt: skip

    def timeline(self, pipeline: Pipeline, costs: Sequence[CostModel]) -> Timeline:
        """The step that the prediction is of."""
        between = link_between(self.mesh, self.hardware.links)
        return timeline_of(pipeline, costs, self.optimizer, between)

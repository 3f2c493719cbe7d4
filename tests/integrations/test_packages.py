"""`examples/try_packages.py`: what it says of a model, and of a package that is not installed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.package_models import Case, Entry
from examples.package_models import squares as loss_fn
from examples.try_packages import ENTRIES, outcomes, version


def tiny_entry(how: str) -> Entry:
    """An entry whose model is right, or depends on data in a branch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if how == "branch" and (x > 0).all():
                return x
            return self.layer(x)

    def make() -> Case:
        return Case(Model(), {"x": torch.randn(8, 4, dtype=torch.float64)}, loss_fn)

    return Entry("torch", "images", make)


def test_a_model_is_the_same_or_refused_by_name() -> None:
    assert set(outcomes(tiny_entry("right")).values()) == {"same"}
    for outcome in outcomes(tiny_entry("branch")).values():
        assert outcome.startswith("refused: CaptureError: cannot trace Model")


def test_packages_that_are_not_installed_have_no_version() -> None:
    assert version(tiny_entry("right")._replace(package="autopar-has-no-such-package")) is None
    assert version(ENTRIES["YolosForObjectDetection"]) is not None

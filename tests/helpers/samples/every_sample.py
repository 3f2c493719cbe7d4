"""The sample calls of all operators together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tests.helpers.samples.place_samples import PLACE_SAMPLES
from tests.helpers.samples.random_samples import RANDOM_SAMPLES
from tests.helpers.samples.rule_samples import SAMPLES as GENERAL_SAMPLES
from tests.helpers.samples.rule_samples import Sample, call, x
from tests.helpers.samples.vision_samples import VISION_SAMPLES

EXPERTS = torch.tensor([3, 0, 0, 1, 2, 3, 3, 0])
SAMPLES: Mapping[str, Sequence[Sample]] = {
    **GENERAL_SAMPLES, **PLACE_SAMPLES, **VISION_SAMPLES, **RANDOM_SAMPLES,
    "autopar.expert_linear.default": [
        call(x(8, 4), x(4, 4, 4), EXPERTS), call(x(8, 4), x(4, 4, 8), EXPERTS, True),
    ],
    "autopar.expert_mlp.default": [
        call(x(8, 4), x(4, 8, 4), x(4, 4, 4), EXPERTS, "silu", False),
        call(x(8, 4), x(4, 4, 16), x(4, 8, 4), EXPERTS, "gelu_tanh", True),
        call(x(8, 4), x(4, 8, 4), x(4, 4, 8), EXPERTS, "gelu", False),
        call(
            x(8, 4), x(4, 4, 16), x(4, 8, 4), EXPERTS, "clamped_swiglu 1.5 0.5", True, x(4, 16),
            True,
        ),
    ],
    "autopar.expert_gated_mlp.default": [
        call(x(8, 4), x(4, 8, 4), x(4, 8, 4), x(4, 4, 8), EXPERTS, "silu", False),
        call(
            x(8, 4), x(4, 4, 8), x(4, 4, 8), x(4, 8, 4), EXPERTS, "clamped_swiglu 1.5 0.5", True
        ),
    ],
}  # fmt: skip

"""Parity of models with less usual operators: complex numbers, indexing, sorts, class weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.options import Manual

N_CLASSES = 8


class Fourier(nn.Module):
    """A block of FNet, and rotations by complex numbers as in Llama 4."""

    def mixed(self, h: Tensor) -> Tensor:
        h = h + torch.fft.fftn(h, dim=(1, 2)).real
        turns = torch.polar(torch.ones(4, 8), torch.arange(32.0).view(4, 8))
        return torch.view_as_real(
            torch.view_as_complex(h.view(*h.shape[:2], 8, 2)) * turns
        ).flatten(2)


class Places(nn.Module):
    """Tokens are sorted, read and written by index."""

    def mixed(self, h: Tensor) -> Tensor:
        scores, order = h.sum(-1).sort(dim=1, descending=True)
        chosen = h[torch.arange(len(h))[:, None], order[:, :2]]
        written = torch.zeros_like(h).index_copy(1, torch.tensor([0, 3]), chosen)
        return written + h.roll(1, 1) * scores.softmax(-1)[..., None] + h.repeat(1, 1, 2)[..., 8:24]


class Model(nn.Module):
    weights: Tensor

    def __init__(self, middle: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(16, 16), middle()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, N_CLASSES)
        self.register_buffer("weights", torch.arange(1.0, 1 + N_CLASSES))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.middle.mixed(self.embed(ids))  # type: ignore[operator]
        logits = self.down(F.selu(self.up(h))).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), self.weights, label_smoothing=0.1)


SETTINGS: dict[str, dict[str, Any]] = {
    "tensor": {"forbid": ("data", "pipeline")},
    "zero3": {"manual": Manual(dp=2, zero=3)},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("middle", [Fourier, Places])
def test_parity(middle: type[nn.Module], setting: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(16, (4, 4), generator=generator)
    labels = torch.randint(N_CLASSES, (4, 4), generator=generator)
    labels[0, :2] = -100
    torch.manual_seed(1)
    report = autopar.verify(
        Model(middle), (1, 2), {"ids": ids, "labels": labels}, precision="fp64",
        **SETTINGS[setting],
    )  # fmt: skip
    report.raise_if_wrong()
    assert report.tolerance == 1e-10

"""Models with less usual operators: transposed convolutions, frozen norms, FFTs, sorts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, SIDE, N_CLASSES = 8, 8, 8


class Frozen(nn.Module):
    """A residual block whose batch norms are frozen, between a convolution and a classifier."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        inner = width // 2
        self.enter, self.head = nn.Conv2d(4, width, 3, 2, 1), nn.Linear(width, N_CLASSES)
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        for layer in self.layers:
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
                for name, statistic in layer.named_buffers():
                    if name != "num_batches_tracked":
                        nn.init.uniform_(statistic, 0.5, 2)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.enter(image)
        x = F.relu(x + self.layers(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


class UNet(nn.Module):
    """Down by a pool, up by a transposed convolution and by interpolation, with a skip."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, width, 3, padding=1, padding_mode="reflect")
        self.deep = nn.Conv2d(width, 2 * width, 3, padding="same")
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = nn.Conv2d(2 * width, 4, 1)
        self.norm = nn.InstanceNorm2d(width, affine=True)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        skip = F.silu(self.norm(self.enter(image)))
        deep = self.up(self.deep(F.avg_pool2d(skip, 2)))
        coarse = F.interpolate(F.max_pool2d(deep, 2), scale_factor=2, mode="bilinear")
        return (self.join(torch.cat([skip, coarse], 1)) - image).pow(2).mean()


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


class Tokens(nn.Module):
    """Class weights and smoothed labels; `middle` mixes the features of tokens."""

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


def images(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, 4, SIDE, SIDE)
    return {
        "image": torch.randn(shape, dtype=torch.float64, generator=generator),
        "label": torch.randint(N_CLASSES, (ROWS,), generator=generator),
    }


def tokens(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(16, (ROWS, 4), generator=generator)
    labels = torch.randint(N_CLASSES, (ROWS, 4), generator=generator)
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "frozen batch norms": (Frozen, images),
    "down and up": (UNet, images),
    "fourier": (partial(Tokens, Fourier), tokens),
    "places": (partial(Tokens, Places), tokens),
}

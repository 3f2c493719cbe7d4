"""Habits of image training: mixed targets, losses, batch norm, layouts, collectives by hand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar import NotSupportedError
from autopar.errors import StateError
from tests.habits.table import ALL, Batch, Run, habit
from tests.habits.tasks import parallelize, train, trains

SECTION = "Vision"
CLASSES, ROWS, SIDE = 6, 8, 8


class DropPath(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = p

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        random = x.new_empty(shape).bernoulli_(keep)
        if keep > 0.0:
            random.div_(keep)
        return x * random


class LayerScale(nn.Module):
    def __init__(self, dim: int, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(1e-1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.ls1, self.ls2 = LayerScale(dim, False), LayerScale(dim, True)
        self.path = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        )
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        x = x + self.path(self.ls1(self.proj(h)))
        return x + self.path(self.ls2(self.mlp(x)))


class Vit(nn.Module):
    """A vision transformer, as timm writes it."""

    checkpoints = False

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 5, dim))
        self.blocks = nn.Sequential(*(Layer(dim) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def group_matcher(self) -> dict[str, Any]:
        return {"stem": r"^cls_token|pos_embed|patch_embed", "blocks": r"^blocks\.(\d+)"}

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.norm(self.run_blocks(x))

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class CheckpointSeq(Vit):
    """`checkpoint_seq` of timm."""

    def run_blocks(self, x: Tensor) -> Tensor:
        functions, end, every = list(self.blocks.children()), -1, 1

        def run(start: int, last: int) -> Any:
            def forward(value: Tensor) -> Tensor:
                for j in range(start, last + 1):
                    value = functions[j](value)
                return value

            return forward

        for start in range(0, len(functions) - 1, every):
            end = start + every - 1
            x = checkpoint(run(start, end), x, use_reentrant=False)
        return run(end + 1, len(functions) - 1)(x)


def images(seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 3, SIDE, SIDE, generator=g, dtype=torch.float64)
    return {"x": x, "target": torch.randint(CLASSES, (ROWS,), generator=g)}


of_images = partial(trains, SECTION, kind=Vit, batches=images)


def mixed(seed: int) -> Batch:
    """timm's `Mixup` with cut-out boxes: images mixed with the batch backwards, soft targets."""
    batch, lam = images(seed), 0.3 + 0.1 * seed
    x, target = batch["x"].clone(), batch["target"]
    if seed % 2:
        x[:, :, 2:6, 1:5] = x.flip(0)[:, :, 2:6, 1:5]
    else:
        x.mul_(lam).add_(x.flip(0).mul(1.0 - lam))

    def one_hot(labels: Tensor) -> Tensor:
        off = 0.1 / CLASSES
        out = torch.full((ROWS, CLASSES), off, dtype=torch.float64)
        return out.scatter_(1, labels.view(-1, 1), 0.9 + off)

    return {"x": x, "target": one_hot(target) * lam + one_hot(target.flip(0)) * (1.0 - lam)}


@of_images("`Mixup` and `CutMix` in the loader, soft targets", batches=mixed)
def soft_cross_entropy(x: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return torch.sum(-batch["target"] * F.log_softmax(x, dim=-1), dim=-1).mean()


@of_images("mixing inside of forward: `0.7 * x + 0.3 * x.flip(0)`")
class Mixing(Vit):
    """Mixes the batch with itself."""

    def forward(self, x: Tensor, target: Any) -> Any:  # type: ignore[override]
        x = 0.7 * x + 0.3 * x.flip(0)
        logits = super().forward(x)
        return 0.7 * F.cross_entropy(logits, target) + 0.3 * F.cross_entropy(logits, target.flip(0))


@of_images("label smoothing by hand: `gather`, `logprobs.mean(-1)`")
def smoothed(x: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """timm's `LabelSmoothingCrossEntropy`."""
    logprobs = F.log_softmax(x, dim=-1)
    nll = -logprobs.gather(dim=-1, index=batch["target"].unsqueeze(1)).squeeze(1)
    return (0.9 * nll - 0.1 * logprobs.mean(dim=-1)).mean()


@of_images("BCE of mixed targets, summed over classes: `target.gt(0.2)`", batches=mixed)
def binary(x: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """timm's `BinaryCrossEntropy` of dense targets, summed over classes."""
    target = batch["target"].gt(0.2).to(dtype=x.dtype)
    loss = F.binary_cross_entropy_with_logits(x, target, reduction="none")
    return loss.sum(-1).mean()


@of_images("BCE of labels: `torch.full(...).scatter_(1, labels, on)`")
def binary_of_labels(x: Tensor, batch: Mapping[str, Any]) -> Tensor:
    off = 0.1 / CLASSES
    target = torch.full((x.size()[0], CLASSES), off, dtype=x.dtype).scatter_(
        1, batch["target"].long().view(-1, 1), 0.9 + off
    )
    return F.binary_cross_entropy_with_logits(x, target)


@of_images("AugMix: `torch.split` of the batch, a divergence of the parts")
def jsd(x: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """AugMix: the batch is two splits of the same images."""
    one, two = torch.split(x, x.shape[0] // 2)
    loss = F.cross_entropy(one, batch["target"][: ROWS // 2])
    probs = F.softmax(one, dim=1), F.softmax(two, dim=1)
    mixture = torch.clamp(torch.stack(probs).mean(dim=0), 1e-7, 1).log()
    apart: Any = sum(F.kl_div(mixture, p, reduction="batchmean") for p in probs)
    return loss + 6 * apart / 2


@of_images("`checkpoint_seq(self.blocks, x)`: checkpointed closures over slices of layers")
def cross_entropy(x: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(x, batch["target"])


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


@habit(SECTION, "`dist.all_reduce(loss.clone())`, divided by the number of ranks", kind=Vit,
       layouts=ALL)  # fmt: skip
def reduced_loss(run: Run) -> None:
    train(run, images, cross_entropy)
    loss: Any = run.pm.step(**images(3))
    total = loss.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    assert abs(total / dist.get_world_size() - loss) < 1e-12


@habit(SECTION, "`distribute_bn`: buffers of batch norm all-reduced and divided", kind=Convs)
def distribute_bn(run: Run) -> None:
    train(run, images, cross_entropy)
    for name, buffer in run.pm.named_buffers(recurse=True):
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
            buffer /= float(dist.get_world_size())
    train(run, images, cross_entropy)


@habit(SECTION, "`model.to(memory_format=torch.channels_last)`, and the images", kind=Convs,
       layouts=ALL)  # fmt: skip
def channels_last(run: Run) -> None:
    for m in (run.model, run.alone):
        m.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def last(seed: Any) -> Any:
        b = images(seed)
        return {**b, "x": b["x"].contiguous(memory_format=torch.channels_last)}

    train(run, last, cross_entropy)


@habit(SECTION, "`pm.forward_features(x)`", "`pm(**batch)`, or the original model", kind=Vit,
       refused=(NotSupportedError, "forward_features"))  # fmt: skip
def features(run: Run) -> None:
    parallelize(run, images(0), loss_fn=cross_entropy)
    run.pm.forward_features(images(0)["x"])


@habit(SECTION, "batch norm frozen before: `bn.eval()`, `requires_grad_(False)`", kind=Convs,
       layouts=ALL)  # fmt: skip
def frozen_bn(run: Run) -> None:
    for m in (run.model, run.alone):
        for mod in m.modules():
            if isinstance(mod, nn.BatchNorm2d):
                mod.eval()
                mod.weight.requires_grad_(False)
                mod.bias.requires_grad_(False)
    train(run, images, cross_entropy)


@habit(SECTION, "batch norm frozen later: `bn.eval()` of `pm`", "set it before", kind=Convs,
       refused=(NotSupportedError, "evaluation mode"))  # fmt: skip
def frozen_bn_pm(run: Run) -> None:
    parallelize(run, images(0), loss_fn=cross_entropy)
    for mod in run.pm.modules():
        if isinstance(mod, nn.BatchNorm2d):
            mod.eval()
    run.pm.step(**images(0))


@habit(SECTION, "weights initialised later: `model.apply(init)` with `weight.data.normal_()`",
       "initialise before", kind=Vit,
       refused=(StateError, "train nothing"))  # fmt: skip
def init_after(run: Run) -> None:
    parallelize(run, images(0), loss_fn=cross_entropy)

    def init(m: Any) -> Any:
        if isinstance(m, nn.Linear):
            m.weight.data.normal_(0, 0.02)

    run.model.apply(init)
    run.pm.step(**images(0))


@habit(SECTION, "masks on gradients: `p.grad.mul_(rows)`, `p.grad = p.grad * columns`", kind=Vit,
       layouts=ALL)  # fmt: skip
def grad_mask(run: Run) -> None:
    def mask(m: Any) -> None:
        for p in m.parameters():
            if p.ndim == 2:
                g = torch.Generator().manual_seed(p.numel())
                rows = (torch.rand(p.shape[0], 1, generator=g) < 0.5).double()
                columns = (torch.rand(p.shape[1], generator=g) < 0.5).double()
                p.grad.mul_(rows)
                p.grad = p.grad * columns
                p.grad *= (torch.rand(p.shape, generator=g) < 0.9).double()

    train(run, images, cross_entropy, change=mask)


@habit(SECTION, "`torch.jit.trace(model, x)` given to autopar", "pass the Python module", kind=Vit,
       refused=(NotSupportedError, "TorchScript"))  # fmt: skip
def scripted(run: Run) -> None:
    run.model = torch.jit.trace(run.model, images(0)["x"])
    parallelize(run, images(0), loss_fn=cross_entropy)

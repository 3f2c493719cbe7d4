"""Steps of random models, of all families of operators; a maker draws one, or None if none fits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.random_models.draw import (
    BATCH,
    CLASSES,
    IDS,
    LABELS,
    LENGTH,
    Draw,
    Maker,
    Run,
    Step,
    Weight,
)


def unary(d: Draw) -> Step | None:
    if (i := d.value()) is None:
        return None
    name = d.rng.choice(("relu", "gelu", "tanh", "silu", "sigmoid", "sin", "softplus"))
    function: Run = getattr(F, name, None) or getattr(torch, name)
    return Step(name, (i,), function)


def scaled(d: Draw) -> Step | None:
    i = d.value()
    return None if i is None else Step("2 v - 1", (i,), lambda v: 2 * v - 1)


def binary(d: Draw) -> Step | None:
    """Two values that broadcast."""
    if (i := d.value()) is None:
        return None
    a = d.values[i]
    j = d.value(lambda v: v is not a and _broadcasts(v, a))
    name = d.rng.choice(("add", "sub", "mul", "maximum", "atan2"))
    return None if j is None else Step(name, (i, j), getattr(torch, name))


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


def by_weight(d: Draw) -> Step | None:
    """A bias or a scale of some of the dims."""
    if (i := d.value()) is None:
        return None
    shape = [n if d.rng.random() < 0.7 else 1 for n in d.values[i].shape[1:]]
    how = d.rng.choice((torch.add, torch.mul))
    return Step("by weight", (i,), lambda part, v: how(v, part.w), d.weight(*shape))


def chosen(d: Draw) -> Step | None:
    if (i := d.value()) is None:
        return None
    return d.rng.choice(
        (
            Step("where", (i,), lambda v: torch.where(v > 0.1, v, v * 0.2)),
            Step("masked_fill", (i,), lambda v: v.masked_fill(v.detach() < 0, 0.0)),
            Step("clamp", (i,), lambda v: v.clamp(-0.7, 0.7)),
            Step("tril", (i,), lambda v: v.tril() if v.dim() > 1 else v),
        )
    )


def linear(d: Draw) -> Step | None:
    if (i := d.value()) is None:
        return None
    part = d.weight(d.width(), d.values[i].shape[-1])
    if d.rng.random() < 0.3:
        part = d.weight(d.values[i].shape[-1], d.width())
        return Step("matmul", (i,), lambda part, v: v @ part.w, part)
    return Step("linear", (i,), lambda part, v: F.linear(v, part.w), part)


def einsum(d: Draw) -> Step | None:
    if (i := d.value(lambda v: v.dim() == 3)) is None:
        return None
    _, s, h = d.values[i].shape
    equation, shape = d.rng.choice(
        (
            ("bsh,hnk->bsnk", (h, 2, 3)),
            ("bsh,sho->bso", (s, h, 4)),
            ("bsh,so->boh", (s, 4)),
            ("bsh,ho->ob", (h, 8)),
        )
    )
    part = d.weight(*shape)
    return Step(equation, (i,), lambda part, v: torch.einsum(equation, v, part.w), part)


def product(d: Draw) -> Step | None:
    """A matmul of two values, or of one with itself."""
    if (i := d.value(lambda v: v.dim() > 1)) is None:
        return None
    a = d.values[i]

    def fits(v: Tensor) -> bool:
        return (
            v.dim() > 1 and v.shape[-1] == a.shape[-1] and _broadcasts(v[..., 0, 0], a[..., 0, 0])
        )

    j = d.value(fits)
    return None if j is None else Step("a b^T", (i, j), lambda a, b: a @ b.mT / a.shape[-1])


class Attention(nn.Module):
    """Grouped queries or not; one projection for all three, or three; masks of all forms."""

    def __init__(self, width: int, heads: int, key_heads: int, fused: bool, mask: str) -> None:
        super().__init__()
        self.sizes, self.mask = [heads * 2, key_heads * 2, key_heads * 2], mask
        outs = [sum(self.sizes)] if fused else self.sizes
        self.parts = nn.ModuleList(nn.Linear(width, n).double() for n in outs)
        self.bias = Weight(heads, LENGTH, LENGTH) if mask == "learned" else None

    def forward(self, v: Tensor, ids: Tensor) -> Tensor:
        projected = [part(v) for part in self.parts]
        if len(projected) == 1:
            projected = projected[0].split(self.sizes, -1)
        q, k, w = (t.view(*t.shape[:2], -1, 2).transpose(1, 2) for t in projected)
        mask: Tensor | None = None if self.bias is None else self.bias.w
        if self.mask == "padding":  # a row without a key would have no weights
            mask = (ids > 1)[:, None, None] | torch.eye(LENGTH, dtype=torch.bool)
        out = F.scaled_dot_product_attention(
            q, k, w, mask, is_causal=self.mask == "causal",
            enable_gqa=self.sizes[0] != self.sizes[1],
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)


def attention(d: Draw) -> Step | None:
    if (i := d.value(lambda v: v.dim() == 3 and v.shape[0] == BATCH)) is None:
        return None
    _, length, width = d.values[i].shape
    masks = ("none", "causal", *(("padding", "learned") if length == LENGTH else ()))
    mask, fused = d.rng.choice(masks), d.rng.random() < 0.5
    part = Attention(width, 4, d.rng.choice((4, 2, 1)), fused, mask)
    return Step(f"attention {mask}", (i, IDS), lambda part, *values: part(*values), part)


def layer(d: Draw) -> Step | None:
    """One of torch's own."""
    fits = lambda v: v.dim() == 3 and v.shape[0] == BATCH and v.shape[-1] % 2 == 0  # noqa: E731
    if (i := d.value(fits)) is None:
        return None
    width, norm_first = d.values[i].shape[-1], d.rng.random() < 0.5
    part = nn.TransformerEncoderLayer(
        width, 2, 8, d.rng.choice((0.0, 0.1)), norm_first=norm_first, batch_first=True
    )
    return Step("encoder layer", (i,), lambda part, v: part(v), part.double())


def norm(d: Draw) -> Step | None:
    if (i := d.value(lambda v: v.dim() > 1 and v.shape[-1] > 2)) is None:
        return None
    width = d.values[i].shape[-1]
    parts = (nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-5), nn.LayerNorm(width, bias=False))
    part = d.rng.choice(parts).double()
    return Step(type(part).__name__, (i,), lambda part, v: part(v), part)


def channel_norm(d: Draw) -> Step | None:
    """Of dim 1: over the batch in training, or by groups."""
    if (i := d.value(lambda v: 2 <= v.dim() <= 4 and v.shape[0] == BATCH)) is None:
        return None
    v = d.values[i]
    c = v.shape[1]
    batch_norms = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    part: nn.Module = batch_norms[v.dim()](c, affine=d.rng.random() < 0.7)
    if d.rng.random() < 0.4:
        groups = 2 if c % 2 == 0 else 1
        if c // groups * math.prod(v.shape[2:]) < 3:
            return None
        part = nn.GroupNorm(groups, c)
    return Step(type(part).__name__, (i,), lambda part, v: part(v), part.double())


def along(d: Draw) -> Step | None:
    if (i := d.value()) is None:
        return None
    dim = d.dim(d.values[i])
    name, run = d.rng.choice(
        (
            ("softmax", lambda v: v.softmax(dim)),
            ("log_softmax", lambda v: v.log_softmax(dim)),
            ("cumsum", lambda v: v.cumsum(dim)),
            ("flip", lambda v: v.flip(dim)),
            ("roll", lambda v: v.roll(1, dim)),
            ("sort", lambda v: v.sort(dim)[0]),
            ("normalize", lambda v: F.normalize(v, dim=dim, eps=0.1)),
            ("pad", lambda v: F.pad(v, (1, 1))),
        )
    )
    return Step(f"{name} {dim}", (i,), run)


def reduction(d: Draw) -> Step | None:
    if (i := d.value(lambda v: v.dim() > 1)) is None:
        return None
    dim, keep = d.dim(d.values[i]), d.rng.random() < 0.5
    name, run = d.rng.choice(
        (
            ("sum", lambda v: v.sum(dim, keep)),
            ("mean", lambda v: v.mean(dim, keep)),
            ("amax", lambda v: v.amax(dim, keep)),
            ("max", lambda v: v.max(dim, keep)[0]),
            ("logsumexp", lambda v: v.logsumexp(dim, keep)),
            ("var", lambda v: v.var(dim, correction=0, keepdim=keep)),
        )
    )
    return Step(f"{name} {dim}", (i,), run)


def view(d: Draw) -> Step | None:
    """Dims joined, taken apart, in another order, repeated."""
    if (i := d.value(lambda v: v.dim() > 1)) is None:
        return None
    v = d.values[i]
    dim, last = d.dim(v), v.dim() - 1
    other = d.rng.randrange(v.dim())
    at = d.rng.randrange(last)
    half = v.shape[dim] // 2
    cuts = {
        "chunk": lambda v: torch.cat(v.chunk(2, dim)[::-1], dim),
        "unflatten": lambda v: v.unflatten(dim, (2, -1)),
        "slice": lambda v: v.narrow(dim, half, half),
        "gate": lambda v: torch.mul(*v.chunk(2, dim)),
    }
    others = {
        "flatten": lambda v: v.flatten(at, at + 1),
        "transpose": lambda v: v.transpose(dim, other),
        "permute": lambda v: v.permute(*range(1, v.dim()), 0),
        "unsqueeze": lambda v: v.unsqueeze(dim),
        "squeeze": lambda v: v.squeeze(),
        "select": lambda v: v.select(dim, -1),
        "unbind": lambda v: sum(v.unbind(dim)),
        "expand": lambda v: v.unsqueeze(dim).expand(*v.shape[:dim], 2, *v.shape[dim:]),
        "repeat": lambda v: v.repeat_interleave(2, dim),
        "first": lambda v: v[..., :-1] if v.shape[-1] > 1 else v,
        "reversed": lambda v: v.reshape(*reversed(v.shape)),
    }
    name, run = d.rng.choice([*others.items(), *(cuts.items() if v.shape[dim] % 2 == 0 else ())])
    return Step(f"{name} {dim}", (i,), run)


def joined(d: Draw) -> Step | None:
    if (i := d.value()) is None:
        return None
    a = d.values[i]
    j = d.value(lambda v: v.shape == a.shape)
    dim = d.dim(a)
    name = d.rng.choice(("cat", "stack"))
    run = {"cat": torch.cat, "stack": torch.stack}[name]
    return None if j is None else Step(f"{name} {dim}", (i, j), lambda *v: run(v, dim))


def convolution(d: Draw) -> Step | None:
    if (i := d.value(lambda v: v.dim() in (3, 4) and v.shape[0] == BATCH)) is None:
        return None
    v = d.values[i]
    n, c, two_d = d.width(), v.shape[1], v.dim() == 4
    kernel = 2 if min(v.shape[2:]) > 1 else 1
    groups = d.rng.choice([g for g in (1, 2, c) if c % g == 0 and n % g == 0])
    options: dict[str, Any] = {
        "stride": d.rng.choice((1, kernel)), "padding": d.rng.choice((0, 1)) * (kernel - 1),
        "groups": groups, "bias": d.rng.random() < 0.7,
    }  # fmt: skip
    part = (nn.Conv2d if two_d else nn.Conv1d)(c, n, kernel, **options).double()
    return Step("conv", (i,), lambda part, v: part(v), part)


def pool(d: Draw) -> Step | None:
    if (i := d.value(lambda v: v.dim() in (3, 4) and min(v.shape[2:]) > 1)) is None:
        return None
    n = d.values[i].dim() - 2
    name = d.rng.choice(("max", "avg"))
    run, stride = getattr(F, f"{name}_pool{n}d"), d.rng.choice((1, 2))
    return Step(f"{name}_pool", (i,), lambda v: run(v, 2, stride))


def upsample(d: Draw) -> Step | None:
    i = d.value(lambda v: v.dim() in (3, 4))
    return None if i is None else Step("upsample", (i,), lambda v: F.interpolate(v, scale_factor=2))


def dropout(d: Draw) -> Step | None:
    if (i := d.value(lambda v: v.dim() > 1)) is None:
        return None
    if d.values[i].dim() == 4 and d.rng.random() < 0.5:
        return Step("dropout2d", (i,), lambda v: F.dropout2d(v, 0.3))
    return Step("dropout", (i,), lambda v: F.dropout(v, 0.3))


def embedding(d: Draw) -> Step | None:
    part = d.weight(CLASSES, d.width())
    return Step("embedding", (IDS,), lambda part, ids: F.embedding(ids, part.w), part)


def by_place(d: Draw) -> Step | None:
    """Read, written or chosen at places that ids or the largest values give."""
    if (i := d.value(lambda v: v.dim() == 3 and v.shape[:2] == (BATCH, LENGTH))) is None:
        return None
    h = d.values[i].shape[-1]

    def wide(ids: Tensor) -> Tensor:
        return (ids % LENGTH)[..., None].expand(-1, -1, h)

    name, run = d.rng.choice(
        (
            ("gather", lambda v, ids: v.gather(1, wide(ids))),
            ("scatter_add", lambda v, ids: torch.zeros_like(v).scatter_add(1, wide(ids), v)),
            ("index", lambda v, ids: v[torch.arange(len(v)), ids[:, 0] % LENGTH]),
            ("index_select", lambda v, ids: v.index_select(1, torch.tensor([2, 0, 1]))),
            ("index_add", lambda v, ids: v.index_add(1, torch.tensor([3, 0]), v[:, :2])),
            ("masked", lambda v, ids: torch.where((ids > 2)[..., None], v, v.tanh())),
            ("one_hot", lambda v, ids: v.mT @ F.one_hot(ids, CLASSES).to(v.dtype)),
            ("topk", lambda v, ids: v.topk(2, -1)[0]),
            ("argmax", lambda v, ids: v.gather(-1, v.detach().argmax(-1, keepdim=True))),
        )
    )
    return Step(name, (i, IDS), run)


def experts(d: Draw) -> Step | None:
    """A matrix per row, by the row's id."""
    if (i := d.value(lambda v: v.dim() == 3 and v.shape[:2] == (BATCH, LENGTH))) is None:
        return None

    def run(part: Weight, v: Tensor, ids: Tensor) -> Tensor:
        rows = v.flatten(0, 1)[..., None]
        return (part.w[ids.flatten()] @ rows).squeeze(-1).unflatten(0, (BATCH, LENGTH))

    return Step("experts", (i, IDS), run, d.weight(CLASSES, d.width(), d.values[i].shape[-1]))


MAKERS: tuple[Maker, ...] = (
    unary, scaled, binary, binary, by_weight, chosen, linear, linear, einsum, product, attention,
    layer, norm, channel_norm, along, reduction, view, view, view, joined, convolution, pool,
    upsample, dropout, embedding, by_place, experts,
)  # fmt: skip


def loss(d: Draw, i: int) -> Step:
    """What a value adds to the loss."""
    v = d.values[i]
    if v.shape == (BATCH, LENGTH, CLASSES) and d.rng.random() < 0.8:
        how = d.rng.choice(("mean", "sum"))
        return Step(f"cross-entropy {how}", (i, LABELS), lambda v, y: cross_entropy(v, y, how))
    name, run = d.rng.choice(
        (
            ("mean of squares", lambda v: v.square().mean()),
            ("sum of sines", lambda v: v.sin().sum()),
            ("mean", lambda v: v.mean()),
            ("huber", lambda v: F.smooth_l1_loss(v, torch.ones_like(v))),
        )
    )
    return Step(name, (i,), run)


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)

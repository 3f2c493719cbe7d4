"""Models of torch alone, written as a user would, without transformers and without helpers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, mse_loss, one_hot

from tests.helpers.jobs import Batch
from tests.parity.zoo.entries import (
    CHANNELS,
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    IMAGE,
    N_CLASSES,
    N_LAYERS,
    PATCH,
    SEQUENCE,
    VOCABULARY,
    Entry,
    images,
    next_tokens,
    states,
)

GROUPS = 4


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention`; with `need_weights` it is unfused and the loss reads its weights."""

    def __init__(self, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=batch_first)
        self.norm, self.need_weights = nn.LayerNorm(HIDDEN), need_weights

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found, weights = self.attention(x, x, x, need_weights=self.need_weights)
        loss = mse_loss(self.norm(x + found), y)
        return loss if weights is None else loss + weights.square().mean()


class CrossAttention(nn.Module):
    """Queries of one tensor, keys and values of another one of another width; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            HIDDEN, HEADS, kdim=FFN, vdim=FFN, bias=False, batch_first=True
        )
        self.widen = nn.Linear(HIDDEN, FFN)

    def forward(self, x: Tensor, memory: Tensor, y: Tensor) -> Tensor:
        wide = self.widen(memory)
        found, _ = self.attention(x, wide, wide, need_weights=False)
        return mse_loss(found, y)


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over tokens, some of them padding."""

    def __init__(self, dropout: float = 0.0, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, FFN, dropout, batch_first=True, norm_first=norm_first
        )
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.TransformerEncoder(layer, N_LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        padding = input_ids < VOCABULARY // 8
        padding[:, 0] = False
        x = self.layers(self.embed(input_ids), src_key_padding_mask=padding)
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Decoder(nn.Module):
    """`nn.TransformerDecoder` that reads a memory, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(HIDDEN, HEADS, FFN, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, N_LAYERS, norm=nn.LayerNorm(HIDDEN))

    def forward(self, x: Tensor, memory: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return mse_loss(self.layers(x, memory, tgt_mask=mask.to(x), tgt_is_causal=True), y)


class MixerBlock(nn.Module):
    """One MLP across patches, one across channels."""

    def __init__(self, n_patches: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.across = perceptron(n_patches, 2 * n_patches)
        self.within = perceptron(HIDDEN, FFN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.within(self.norms[1](x))
        return mixed


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021); a convolution makes the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, HIDDEN, PATCH, stride=PATCH)
        n_patches = (IMAGE // PATCH) ** 2
        self.blocks = nn.Sequential(*(MixerBlock(n_patches) for _ in range(N_LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, N_CLASSES))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        return cross_entropy(self.head(self.blocks(x).mean(1)), labels)


class GroupNormNet(nn.Module):
    """Convolutions, group norms and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(CHANNELS, 16, 3, padding=1), nn.GroupNorm(GROUPS, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.GroupNorm(GROUPS, 32),
            nn.SiLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1, groups=GROUPS), nn.GELU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, N_CLASSES),
        )  # fmt: skip

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.layers(pixel_values), labels)


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.body = perceptron(HIDDEN, FFN)
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        logits = self.head(self.norm(x + self.body(x)))
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


class EinsumAttention(nn.Module):
    """Causal attention in which every matmul is an einsum; weights have a dim of heads."""

    def __init__(self) -> None:
        super().__init__()
        head_dim = HIDDEN // HEADS
        self.qkv = nn.Parameter(torch.randn(3, HIDDEN, HEADS, head_dim) * HIDDEN**-0.5)
        self.out = nn.Parameter(torch.randn(HEADS, head_dim, HIDDEN) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsd,tdhk->tbhsk", x, self.qkv)
        scores = torch.einsum("bhqk,bhsk->bhqs", q, k) * q.shape[-1] ** -0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqs,bhsk,hkd->bqd", weights, v, self.out)


class GatedExperts(nn.Module):
    """Top-2 gating with a capacity per row of the batch, as in GShard (Lepikhin et al. 2020).

    `dispatch` and `combine` are (rows, tokens, experts, places). A token is dropped if its expert
    has no free place.
    """

    def __init__(self, capacity: int = SEQUENCE // 2) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN) * FFN**-0.5)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        values, chosen = gates.topk(2, dim=-1)
        values = values / values.sum(-1, keepdim=True)
        combine = self.places(chosen[..., 0], values[..., 0], taken=None)
        first = (combine > 0).sum((1, 3))
        combine = combine + self.places(chosen[..., 1], values[..., 1], taken=first)
        dispatch = (combine > 0).to(x.dtype)
        inputs = torch.einsum("bsec,bsd->ebcd", dispatch, x)
        inner = gelu(torch.einsum("ebcd,edf->ebcf", inputs, self.up))
        outputs = torch.einsum("ebcf,efd->ebcd", inner, self.down)
        return torch.einsum("bsec,ebcd->bsd", combine, outputs)

    def places(self, chosen: Tensor, values: Tensor, taken: Tensor | None) -> Tensor:
        """Experts and gates (rows, tokens) -> combine weights; earlier tokens take places first."""
        mask = one_hot(chosen, EXPERTS)
        place = mask.cumsum(1) - mask
        if taken is not None:
            place = place + taken[:, None]
        kept = mask * (place < self.capacity)
        at = one_hot((place * kept).sum(-1), self.capacity) * kept.sum(-1, keepdim=True)
        return torch.einsum("bs,bse,bsc->bsec", values, kept.to(values), at.to(values))


class EinsumModel(nn.Module):
    """A language model of einsums: attention, and experts in place of a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention = nn.ModuleList(EinsumAttention() for _ in range(N_LAYERS))
        self.experts = nn.ModuleList(GatedExperts() for _ in range(N_LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2 * N_LAYERS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for i, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + experts(self.norms[2 * i + 1](x))
        logits = torch.einsum("bsd,vd->bsv", x, self.embed.weight)
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


def perceptron(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def pairs(seed: int) -> Batch:
    return states(seed, "x", "y")


def pairs_by_position(seed: int) -> Batch:
    return states(seed, "x", "y", rows_first=False)


def with_memory(seed: int) -> Batch:
    return states(seed, "x", "memory", "y")


SECOND = {"batch_dims": {"x": 1, "y": 1}}

FAMILIES = {
    "attention": Entry(partial(SelfAttention, True, False), pairs),
    "attention-weights": Entry(partial(SelfAttention, True, True), pairs),
    "attention-by-position": Entry(
        partial(SelfAttention, False, False), pairs_by_position, options=SECOND
    ),
    "cross-attention": Entry(CrossAttention, with_memory),
    "encoder": Entry(Encoder, next_tokens),
    "encoder-norm-first": Entry(partial(Encoder, norm_first=True), next_tokens),
    "encoder-dropout": Entry(partial(Encoder, dropout=0.1), next_tokens),
    "decoder": Entry(Decoder, with_memory),
    "mixer": Entry(Mixer, images),
    "group-norm": Entry(GroupNormNet, images),
    "tied": Entry(Tied, next_tokens),
    "einsum": Entry(EinsumModel, next_tokens),
}

"""Operators that capture rewrites, in small models under drawn placements, against one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, intra_op_problem
from tests.helpers.captures import captured
from tests.helpers.harness import abstract_cost, generated_code, random_strategy, thread_step
from tests.helpers.nightly import nightly, one_in

__all__ = ["generated_code"]
N_DRAWN = 4


@dataclass(frozen=True)
class Case:
    model: nn.Module
    batch: Mapping[str, Tensor]


class Bags(nn.Module):
    """Bags of a table under a linear layer."""

    def __init__(self, mode: str, learns_factors: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(8, 4, mode=mode, **kwargs), nn.Linear(4, 4)
        self.factors = nn.Parameter(torch.rand(8)) if learns_factors else None

    def forward(self, ids: Tensor, y: Tensor, offsets: Tensor | None = None) -> Tensor:
        factors = None if self.factors is None else self.factors[ids]
        bags = self.table(ids, offsets, per_sample_weights=factors)
        return F.mse_loss(self.head(bags), y, reduction="sum")


def bags(mode: str, form: str = "rows", **kwargs: Any) -> Case:
    batch = {"ids": torch.randint(8, (4, 4) if form == "rows" else (12,)), "y": torch.randn(4, 4)}
    if form != "rows":
        last = [12] if form == "last" else []
        batch["offsets"] = torch.tensor([0, 2, 2, 7, *last])
    return Case(Bags(mode, include_last_offset=form == "last", **kwargs), batch)


class Padded(nn.Module):
    """A padded image, or a convolution that pads it."""

    def __init__(self, mode: Any, amounts: Any, n_spatial: int = 0) -> None:
        super().__init__()
        self.mode, self.amounts, self.first = mode, amounts, nn.Linear(4, 4)
        conv: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}.get(n_spatial)
        self.conv = conv and conv(2, 4, 3, padding=amounts, padding_mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.conv(x) if self.conv else F.pad(x, self.amounts, mode=self.mode)
        return x.pow(2).sum()


def padded(mode: str, *amounts: int, convolves: bool = False) -> Case:
    n_spatial = len(amounts) if convolves else len(amounts) // 2
    x = torch.randn(4, 2, *[5] * (n_spatial - 1), 4)
    return Case(Padded(mode, amounts, n_spatial if convolves else 0), {"x": x})


class Ctc(nn.Module):
    """A linear layer under CTC; without `n` and `m`, lengths are lists."""

    def __init__(self, reduction: Any, zero_infinity: bool = False, blank: int = 0) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(4, 5), nn.CTCLoss(blank, reduction, zero_infinity)

    def forward(
        self, x: Tensor, y: Tensor, n: Tensor | None = None, m: Tensor | None = None
    ) -> Tensor:
        read = [x.shape[1]] * len(x) if n is None else n
        written = [3, 2, 3, 0] if m is None else m
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        return self.loss(log_probs, y, read, written).sum()


class SelectedCtc(Ctc):
    """As transformers computes it: labels are selected by a mask, and counted."""

    def forward(
        self, x: Tensor, y: Tensor, n: Tensor | None = None, m: Tensor | None = None
    ) -> Tensor:
        if y.max() >= 5:
            raise ValueError("a label is out of range")
        known = y >= 0
        return super().forward(x, y.masked_select(known), n, known.sum(-1))


def selected_ctc() -> Case:
    case = ctc()
    labels = torch.tensor([[1, 2, 3], [2, -100, -100], [-100, 1, 3], [3, 3, -100]])
    batch = {**case.batch, "y": labels}
    del batch["m"]
    return Case(SelectedCtc("mean"), batch)


def ctc(*, n_targets: tuple[int, ...] = (4, 3), has_lengths: bool = True, **kwargs: Any) -> Case:
    batch = {"x": torch.randn(4, 6, 4), "y": torch.randint(1, 4, n_targets)}
    if has_lengths:  # the third row has more targets than inputs: its loss is infinite
        longest = 3 if kwargs.get("zero_infinity") else 6
        batch |= {"n": torch.tensor([6, 5, longest, 6]), "m": torch.tensor([3, 2, 3, 1])}
        if longest == 3:
            batch["y"][2] = 1
    return Case(Ctc(kwargs.pop("reduction", "mean"), **kwargs), batch)


class Fourier(nn.Module):
    """A layer of a Fourier neural operator: low frequencies are written into slices of zeros."""

    def __init__(self, n_spatial: int, n_modes: int = 2) -> None:
        super().__init__()
        shape = (4, 4, *[n_modes] * n_spatial)
        self.weights = nn.ParameterList(
            torch.randn(shape, dtype=torch.complex128) for _ in range(2 ** (n_spatial - 1))
        )
        self.first, self.dims, self.n_modes = nn.Linear(8, 8), [-2, -1][-n_spatial:], n_modes

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        spectrum = torch.fft.rfftn(h, dim=self.dims)
        out = torch.zeros_like(spectrum)
        low, high = slice(self.n_modes), slice(-self.n_modes, None)
        for weight, rows in zip(self.weights, (low, high), strict=False):
            part: Any = (..., *[rows][: len(self.dims) - 1], low)
            out[part] = torch.einsum("bi...,io...->bo...", spectrum[part], weight)
        return (torch.fft.irfftn(out, h.shape[-len(self.dims) :], self.dims) + h).pow(2).sum()


class ComplexWrites(nn.Module):
    """Other writes into a complex tensor: rows, steps, sums and reals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.first(x))
        out = torch.zeros_like(spectrum)
        out[:, 1] = spectrum[:, 0]
        out[:, ::2] += spectrum[:, 1::2].conj()
        out[..., 1::3].copy_(spectrum[..., :3].real)
        out[:, 3, -1] = 0.5
        return torch.view_as_real(out).pow(2).sum()


class Recurrent(nn.Module):
    """A cell in a loop."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(out).pow(2).sum()


class Spectral(nn.Module):
    """Sound through its short-time spectrum, and back if asked."""

    def __init__(self, returns: bool, **kwargs: Any) -> None:
        super().__init__()
        self.first, self.returns, self.kwargs = nn.Linear(32, 32), returns, kwargs
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kwargs = {"n_fft": 8, "hop_length": 4, "window": self.window, **self.kwargs}
        found = torch.stft(x, return_complex=True, **kwargs)
        if self.returns:
            return torch.istft(found, length=32, **kwargs).pow(3).sum()
        return torch.view_as_real(found).pow(2).sum()


class Searched(nn.Module):
    """Features scaled by the bin that they fall into."""

    def __init__(self, per_row: bool) -> None:
        super().__init__()
        self.first, self.per_row = nn.Linear(4, 4), per_row

    def forward(self, x: Tensor) -> Tensor:
        one = torch.linspace(-1, 1, 5, dtype=x.dtype)
        edges = x.detach().sort()[0] if self.per_row else one
        return (self.first(x) * torch.searchsorted(edges, x.detach() + 0.1)).pow(2).sum()


def sound(returns: bool, **kwargs: Any) -> Case:
    return Case(Spectral(returns, **kwargs), {"x": torch.randn(4, 32)})


class Applied(nn.Module):
    """A function of a linear layer's result and its input, as a sum."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        out = self.function(self.first(x), x)
        return out.pow(2).sum() if out.dim() else out


def applied(function: Callable[[Tensor, Tensor], Tensor]) -> Case:
    return Case(Applied(function), {"x": torch.randn(4, 4)})


def flagged(h: Tensor, x: Tensor) -> Tensor:
    mask = x > 0
    mask &= x < 1
    mask |= x < -1
    mask ^= True
    bits = x.argsort(-1)
    bits <<= 2
    return h.masked_fill(mask, 0) * bits


def margins(h: Tensor, x: Tensor) -> Tensor:
    labels = x.argmax(-1)
    several = F.multilabel_margin_loss(h, x.argsort(-1), reduction="mean")
    return several + F.multi_margin_loss(h, labels, weight=torch.arange(4, dtype=x.dtype))


def segments(h: Tensor, x: Tensor) -> Tensor:
    return torch.segment_reduce(h, "sum", lengths=torch.tensor([1, 3]))


def places(h: Tensor, x: Tensor) -> Tensor:
    """Integer tensors without dims index what is read and what is written."""
    i, last = x.abs().sum().long() % 4, torch.tensor(-1)
    read = h[i] + h[:, i, None] + h[i, last] + h[i, 0] + h[..., last, None] + h[i, [1, 2, 0, 0]]
    h = h.clone()
    h[i] = h[last] * 2
    h[i, last] = 1.0
    h[:, i] = h[:, last] + h[0]
    h[0, i], h[last, 2:4], h[i, None] = 3.0, h[i, 1:3], read[:1]
    return read + h


CASES = {
    "places": lambda: applied(places),
    "flags in place": lambda: applied(flagged),
    "margins": lambda: applied(margins),
    "segments": lambda: applied(segments),
    "distances of pairs": lambda: applied(lambda h, x: torch.pdist(h) + torch.pdist(h.mT)),
    "gaussian likelihood": lambda: applied(lambda h, x: F.gaussian_nll_loss(x, h, h, full=True)),
    "gaussian likelihood with one variance a row": lambda: applied(
        lambda h, x: F.gaussian_nll_loss(h, x, h[:, 0].exp(), reduction="none")
    ),
    "covariance": lambda: applied(lambda h, x: torch.cov(h) + h.T.corrcoef()),
    "gru cell": lambda: Case(Recurrent(nn.GRUCell(4, 4)), {"x": torch.randn(4, 3, 4)}),
    "lstm cell": lambda: Case(Recurrent(nn.LSTMCell(4, 4)), {"x": torch.randn(4, 3, 4)}),
    "rnn cell": lambda: Case(Recurrent(nn.RNNCell(4, 4)), {"x": torch.randn(4, 3, 4)}),
    "stft": lambda: sound(returns=False),
    "stft and back": lambda: sound(returns=True),
    "searchsorted": lambda: Case(Searched(per_row=False), {"x": torch.randn(4, 4)}),
    "searchsorted per row": lambda: Case(Searched(per_row=True), {"x": torch.randn(4, 4)}),
    "fourier layer of a signal": lambda: Case(Fourier(1), {"x": torch.randn(4, 4, 8)}),
    "fourier layer of an image": lambda: Case(Fourier(2), {"x": torch.randn(4, 4, 6, 8)}),
    "writes into complex tensors": lambda: Case(ComplexWrites(), {"x": torch.randn(4, 4, 8)}),
    "ctc": lambda: ctc(),
    "ctc of targets in a list": lambda: ctc(n_targets=(9,)),
    "ctc of selected targets": selected_ctc,
    "ctc, summed": lambda: ctc(reduction="sum", blank=4),
    "ctc per row": lambda: ctc(reduction="none"),
    "ctc of infinite losses": lambda: ctc(zero_infinity=True),
    "ctc with lengths in a list": lambda: ctc(has_lengths=False),
    "circular padding": lambda: padded("circular", 1, 2),
    "circular padding that crops": lambda: padded("circular", 2, -1, 0, 1),
    "circular padding of volumes": lambda: padded("circular", 4, 0, 1, 1, 0, 5),
    "circular padding of a 1-d convolution": lambda: padded("circular", 2, convolves=True),
    "circular padding of a 2-d convolution": lambda: padded("circular", 1, 2, convolves=True),
    "circular padding of a 3-d convolution": lambda: padded("circular", 1, 1, 1, convolves=True),
    "reflected padding": lambda: padded("reflect", 1, 2, 0, 1),
    "repeated padding of volumes": lambda: padded("replicate", 1, 2, 0, 0, 1, 1),
    "bags of a sum": lambda: bags("sum"),
    "bags of a sum, in a list": lambda: bags("sum", "list", padding_idx=3),
    "bags of a sum, with factors": lambda: bags("sum", learns_factors=True),
    "bags of a sum, in a list with factors": lambda: bags("sum", "last", learns_factors=True),
    "bags of a mean": lambda: bags("mean"),
    "bags of a mean, with padding": lambda: bags("mean", padding_idx=-2),
    "bags of a mean, in a list": lambda: bags("mean", "list"),
    "bags of a mean, in a list with padding": lambda: bags("mean", "last", padding_idx=3),
    "bags of a maximum": lambda: bags("max", padding_idx=3),
    "bags of a maximum, in a list": lambda: bags("max", "list"),
}


WITHOUT_BATCH = ("places", "segments", "distances of pairs", "covariance")


@one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_drawn_placements(name: str) -> None:
    torch.manual_seed(0)
    case, rng = CASES[name](), random.Random(name)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in case.batch.items()}
    analysis = Analysis.of(captured(case.model.double(), batch))
    cost = abstract_cost((2,))
    batched = analysis.batch.size and analysis.batch.broken_at is None
    for n_microbatches in (1, 2) if batched else (1,):
        problem = intra_op_problem(analysis, cost, n_microbatches, Constraints(), "adamw")
        for seed in range(N_DRAWN):
            strategy = random_strategy(analysis, problem, n_microbatches, rng)
            assert thread_step(analysis, cost, strategy, batch, seed).wrong == {}
    assert batched or name in WITHOUT_BATCH or "in a list" in name


def test_tables_of_bags_are_never_gathered() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(100_000, 128, mode="sum") for _ in range(3))
            self.head = nn.Linear(3 * 128, 1)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            bags = [table(ids[:, i]) for i, table in enumerate(self.tables)]
            return (self.head(torch.cat(bags, 1)).squeeze(1) - y).pow(2).mean()

    with torch.device("meta"):
        model = Tables()
        batch = {"ids": torch.empty(8192, 3, 4, dtype=torch.int64), "y": torch.empty(8192)}
    plan = autopar.plan(model, autopar.Mesh((1, 4), hardware="a100-80gb"), batch)
    assert all("S(" in str(plan.uses[f"tables.{i}.weight"]) for i in range(3))
    gathered = [c.size_bytes for c in plan.collectives() if c.phase == "param_gather"]
    assert max(gathered, default=0) < 100_000 * 128


def complex_training() -> tuple[list[float], list[float], float]:
    """Norms and weights after three steps of a model with complex weights, sharded and alone."""
    torch.manual_seed(0)
    model, alone = Fourier(2).double(), Fourier(2).double()
    alone.load_state_dict(model.state_dict())
    batch: dict[str, Any] = {"x": torch.randn(4, 4, 6, 8, dtype=torch.float64)}
    pm = autopar.parallelize(model, (1, 2), batch, manual=autopar.Manual(dp=2, zero=3))
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (pm, alone)]
    norms: list[float] = []
    expected: list[float] = []
    for _ in range(3):
        pm.step(**batch)
        alone(**batch).backward()
        norms.append(pm.clip_grad_norm_(0.1).item())
        expected.append(nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = pm.full_state_dict()
    off = [(whole[n] - p).abs().max().item() for n, p in alone.named_parameters() if whole]
    return norms, expected, max(off, default=0.0)


@nightly
def test_parity_of_complex_weights() -> None:
    for norms, expected, off in autopar.launch(complex_training, 2):
        assert norms == pytest.approx(expected, rel=1e-10)
        assert off < 1e-10

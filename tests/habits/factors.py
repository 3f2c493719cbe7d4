"""Habits of adapter libraries: products that stand for changes of frozen weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar import NotSupportedError
from tests.habits.adapters import RANK, SECTION, Adapted, Wrapped
from tests.habits.table import ALL, BOTH, WIDTH, Run, Small, habit, quiet
from tests.habits.tasks import of_learning, trains


class HadaWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w1a: Any, w1b: Any, w2a: Any, w2b: Any, scale: Any) -> Any:
        ctx.save_for_backward(w1a, w1b, w2a, w2b, scale)
        return ((w1a @ w1b) * (w2a @ w2b)) * scale

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        (w1a, w1b, w2a, w2b, scale) = ctx.saved_tensors
        grad_out = grad_out * scale
        temp = grad_out * (w2a @ w2b)
        grad_w1a = temp @ w1b.T
        grad_w1b = w1a.T @ temp
        temp = grad_out * (w1a @ w1b)
        grad_w2a = temp @ w2b.T
        grad_w2b = w2a.T @ temp
        return grad_w1a, grad_w1b, grad_w2a, grad_w2b, None


class Loha(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        o, i = base.weight.shape
        self.w1a, self.w2a = nn.Parameter(torch.randn(o, 2)), nn.Parameter(torch.randn(o, 2))
        self.w1b, self.w2b = nn.Parameter(torch.randn(2, i)), nn.Parameter(torch.randn(2, i))

    def forward(self, x: Tensor) -> Any:
        w = HadaWeight.apply(self.w1a, self.w1b, self.w2a, self.w2b, torch.tensor(0.5))
        return self.base_layer(x) + nn.functional.linear(x, w)


class LohaModel(Adapted):
    layer = Loha


@habit(SECTION, "LoHa: a Hadamard product in an `autograd.Function`", "with tensor parallelism",
       kind=LohaModel, layouts=("tp",))  # fmt: skip
def loha(run: Run) -> None:
    with quiet(".*HadaWeight"):
        run.train(of_learning(run))


class Lokr(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        o, i = base.weight.shape
        self.w1 = nn.Parameter(torch.randn(2, 2))
        self.w2 = nn.Parameter(torch.randn(o // 2, i // 2))

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + nn.functional.linear(
            x, torch.kron(self.w1, self.w2.contiguous())
        )


@trains(SECTION, "LoKr: `torch.kron(w1, w2)`")
class LokrModel(Adapted):
    layer = Lokr


class Oft(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        i = base.in_features
        self.blocks = 2
        self.R = nn.Parameter(torch.randn(2, i // 2, i // 2))

    def forward(self, x: Tensor) -> Any:
        skew = 0.5 * (self.R - self.R.transpose(1, 2))
        eye = torch.eye(skew.shape[1]).unsqueeze(0).expand_as(skew).to(skew)
        q = torch.linalg.solve(eye + skew, eye - skew, left=False)
        rot = torch.block_diag(*[q[i] for i in range(2)])
        return nn.functional.linear(x, self.base_layer.weight @ rot, self.base_layer.bias)


@trains(SECTION, "OFT: a rotation by `torch.linalg.solve`, `torch.block_diag`")
class OftModel(Adapted):
    layer = Oft
    down = False


class AdaLora(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.A, self.E, self.B = (
            nn.Parameter(torch.randn(4, base.in_features)),
            nn.Parameter(torch.randn(4, 1)),
            nn.Parameter(torch.randn(base.out_features, 4)),
        )
        self.ranknum = nn.Parameter(torch.tensor(4.0), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + (x @ (self.A * self.E).T @ self.B.T) * 0.5 / (
            self.ranknum + 1e-5
        )


class AdaModel(Adapted):
    """With AdaLoRA's penalty on factors that are not orthogonal."""

    layer = AdaLora

    def eye(self, like: Any) -> Any:
        return torch.eye(*like.size()).to(like)

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        loss = super().forward(ids, targets)
        regu, num = 0, 0
        for n, p in self.named_parameters():
            if ".A" in n or ".B" in n:
                cov = p @ p.T if ".A" in n else p.T @ p
                num += 1
                regu += torch.norm(cov - self.eye(cov), p="fro")
        return loss + 0.1 * regu / num


@trains(SECTION,
        "AdaLoRA: its penalty, with `torch.eye(..., out=torch.empty_like(cov))`",
        "`torch.eye(...)`",
        refused=(NotSupportedError, "aten.eye.m_out"), layouts=BOTH)  # fmt: skip
class AdaOut(AdaModel):
    def eye(self, like: Any) -> Any:
        return torch.eye(*like.size(), out=torch.empty_like(like))


@habit(SECTION, "AdaLoRA: `p.masked_fill_((p * p.grad).abs() <= c, 0)`", kind=AdaModel, layouts=ALL)
def adalora_mask(run: Run) -> None:
    opts = of_learning(run)
    for seed in range(2):
        run.backward(run.batch(seed))
        for o in opts:
            o.step()
        for m in run.both():
            with torch.no_grad():
                for n, p in m.named_parameters():
                    if n.endswith(".E"):
                        ipt = (p * p.grad).abs().detach()
                        p.masked_fill_(ipt <= 1e-3, 0.0)
        for o in opts:
            o.zero_grad()


@habit(SECTION, "`enable_input_require_grads`: a hook that calls `output.requires_grad_(True)`",
       kind=Wrapped, layouts=ALL)  # fmt: skip
def input_grads(run: Run) -> None:
    models: tuple[Any, ...] = (run.model, run.alone)
    for m in models:
        m.base_model.embed.register_forward_hook(
            lambda module, input, output: output.requires_grad_(True)
        )
    run.train(of_learning(run))


@habit(SECTION, "LoRA+: another learning rate for `lora_B`", kind=Wrapped, layouts=ALL)
def lora_plus(run: Run) -> None:
    def make(m: Any) -> Any:
        b = [p for n, p in m.named_parameters() if "lora_B" in n]
        a = [p for n, p in m.named_parameters() if "lora_A" in n]
        return torch.optim.AdamW([{"params": a, "lr": 1e-3}, {"params": b, "lr": 1.6e-2}])

    run.train([make(m) for m in run.both()])


@habit(SECTION, "adapters combined: `p.data = 0.5 * p.data + 0.5 * q`", kind=Wrapped)
def add_weighted(run: Run) -> None:
    run.train(of_learning(run))
    for m in run.both():
        with torch.no_grad():
            for n, p in m.named_parameters():
                if "lora_A" in n:
                    p.data = 0.5 * p.data + 0.5 * torch.ones_like(p)
    run.train(of_learning(run), first=5)


class Conv1D(nn.Module):
    def __init__(self, nf: Any, nx: Any) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Any:
        size_out = (*x.size()[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class LoraEmbedding(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_embedding_A = nn.ParameterDict(
            {"default": nn.Parameter(torch.randn(RANK, base.num_embeddings))}
        )
        self.lora_embedding_B = nn.ParameterDict(
            {"default": nn.Parameter(torch.randn(base.embedding_dim, RANK))}
        )

    def forward(self, x: Tensor) -> Any:
        A, B = self.lora_embedding_A["default"].T, self.lora_embedding_B["default"].T
        base = self.base_layer
        names = "padding_idx max_norm norm_type scale_grad_by_freq sparse".split()
        after_A = nn.functional.embedding(x, A, **{name: getattr(base, name) for name in names})
        return base(x) + (after_A @ B) * 0.5


@trains(SECTION, "LoRA of an embedding: `F.embedding(x, A.T) @ B.T`; `Conv1D`")
class EmbModel(Small):
    def __init__(self) -> None:
        super().__init__()
        for b in self.blocks:
            b.up = Conv1D(2 * WIDTH, WIDTH)
        self.requires_grad_(False)
        self.embed = LoraEmbedding(self.embed)  # type: ignore[assignment]


@habit(SECTION, 'LoRA as a parametrization: `register_parametrization(layer, "weight", lora)`',
       layouts=ALL)  # fmt: skip
def lora_parametrized(run: Run) -> None:
    class P(nn.Module):
        def __init__(self, i: Any, o: Any) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = (
                nn.Parameter(torch.randn(RANK, i).double()),
                nn.Parameter(torch.randn(o, RANK).double()),
            )
            self.enabled = True

        def forward(self, w: Any) -> Any:
            return w + self.b @ self.a if self.enabled else w

    models: tuple[Any, ...] = (run.model, run.alone)
    for m in models:
        for b in m.blocks:
            nn.utils.parametrize.register_parametrization(b.up, "weight", P(WIDTH, 2 * WIDTH))
            b.up.parametrizations.weight.original.requires_grad_(False)
    run.train(of_learning(run))

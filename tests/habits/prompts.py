"""Habits of adapter libraries: copies, prompts and scales that train beside frozen weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.adapters import RANK, SECTION, Adapted, Wrapped
from tests.habits.table import ALL, WIDTH, Run, Small, habit
from tests.habits.tasks import of_learning, trains


class ModulesToSave(nn.Module):
    def __init__(self, module: nn.Module, name: Any = "default") -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({name: copy.deepcopy(module)})
        self._active_adapter = [name]
        self.original_module.requires_grad_(False)
        self.modules_to_save.requires_grad_(True)

    def __getattr__(self, name: Any) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        modules = self.__dict__["_modules"]
        return getattr(modules["modules_to_save"][self._active_adapter[0]], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save[self._active_adapter[0]](*args, **kwargs)


class Saved(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.base_model.head = ModulesToSave(self.base_model.head)  # type: ignore[assignment]


@habit(SECTION, "`modules_to_save`: a trained copy beside the frozen original", kind=Saved,
       layouts=ALL)  # fmt: skip
def modules_to_save(run: Run) -> None:
    run.train(of_learning(run))
    assert "base_model.head.original_module.weight" in dict(run.alone.named_parameters())


@trains(SECTION, "prompt tuning: learned rows before the sequence, labels `-100` for them")
class Prompted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.prompt = nn.Embedding(2, WIDTH)
        self.register_buffer("prompt_tokens", torch.arange(2), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        tokens: Any = self.prompt_tokens
        prompts = tokens.unsqueeze(0).expand(ids.shape[0], -1)
        prompts = self.mlp(self.prompt(prompts))
        h = torch.cat((prompts, self.embed(ids)), dim=1)
        prefix = torch.full((ids.shape[0], 2), -100).to(targets.device)
        labels = torch.cat((prefix, targets), dim=1)
        logits = self.head(self.hidden(h))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Attending(nn.Module):
    """Attention with keys and values before those of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, h: Tensor, past: Any) -> Any:
        def heads(x: Tensor) -> Tensor:
            return x.view(x.shape[0], -1, 2, WIDTH // 2).transpose(1, 2)

        q, k, v = heads(self.q(h)), heads(self.k(h)), heads(self.v(h))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        n, p = h.shape[1], past[0].shape[2]
        mask = torch.ones(n, n + p, dtype=torch.bool).tril(p)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return h + self.o(out.transpose(1, 2).flatten(2))


@trains(SECTION, "prefix tuning: learned keys and values of every layer")
class Prefixed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attending() for _ in range(2))
        self.requires_grad_(False)
        self.prefix = nn.Embedding(3, 2 * 2 * WIDTH)

    def body(self, ids: Tensor) -> Any:
        h = self.embed(ids)
        past = self.prefix(torch.arange(3).unsqueeze(0).expand(ids.shape[0], -1).to(ids.device))
        past = past.view(ids.shape[0], 3, 4, 2, WIDTH // 2).permute([2, 0, 3, 1, 4]).split(2)
        for i, b in enumerate(self.blocks):
            h = b(self.attention[i](h, past[i]))
        return self.head(h)


class IA3(nn.Module):
    def __init__(self, base: Any, feedforward: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.is_feedforward = feedforward
        size = (1, base.in_features) if feedforward else (base.out_features, 1)
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.randn(size))})
        self.active_adapters = ["default"]

    def forward(self, x: Tensor) -> Any:
        ia3_scaling = 1
        for name in self.active_adapters:
            if name not in self.ia3_l:
                continue
            ia3_scaling *= self.ia3_l[name].flatten()
        if self.is_feedforward:
            return self.base_layer((x * ia3_scaling).to(x.dtype))
        result = self.base_layer(x)
        return (result * ia3_scaling).to(result.dtype)


@trains(SECTION, "IA3: learned scales of inputs and outputs, `scaling = 1; scaling *= p`")
class Scaled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for b in self.blocks:
            b.up, b.down = IA3(b.up, False), IA3(b.down, True)


class Dora(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, RANK, bias=False),
            nn.Linear(RANK, base.out_features, bias=False),
        )
        self.scaling = {"default": 0.5}
        with torch.no_grad():
            self.weight = nn.Parameter(
                torch.linalg.norm(
                    base.weight + 0.5 * self.lora_B.weight @ self.lora_A.weight, dim=1
                ).clone()
            )

    def forward(self, x: Tensor) -> Any:
        x_eye = torch.eye(self.lora_A.weight.shape[1], device=x.device, dtype=x.dtype)
        lora_weight = self.lora_B(self.lora_A(x_eye)).T
        weight = self.base_layer.weight
        norm = torch.linalg.norm(weight + self.scaling["default"] * lora_weight.detach(), dim=1).to(
            weight.dtype
        )
        norm = norm.detach()
        scale = (self.weight / norm).view(1, -1)
        result = self.base_layer(x)
        bias = self.base_layer.bias
        base_result = result - bias if bias is not None else result
        return (
            result
            + (scale - 1) * base_result
            + scale * self.lora_B(self.lora_A(x)) * self.scaling["default"]
        )


@trains(SECTION, "DoRA: magnitudes over a detached norm of `W + BA`")
class DoraModel(Adapted):
    layer = Dora


class Vera(nn.Module):
    def __init__(self, base: Any, A: Any, B: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.vera_A, self.vera_B = A, B
        self.d = nn.Parameter(torch.full((4,), 0.1))
        self.b = nn.Parameter(torch.ones(base.out_features))

    def forward(self, x: Tensor) -> Any:
        A = self.vera_A["default"][:, : x.shape[-1]]
        B = self.vera_B["default"][: self.base_layer.out_features]
        F = nn.functional
        return self.base_layer(x) + self.b * F.linear(self.d * F.linear(x, A), B)


class BufferDict(nn.Module):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        for k, v in values.items():
            self.register_buffer(k, v)

    def __getitem__(self, k: Any) -> Any:
        return self._buffers[k]


@trains(SECTION, "VeRA: random buffers that layers share, learned vectors")
class VeraModel(Small):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        A, B = (
            BufferDict(default=torch.randn(4, 2 * WIDTH)),
            BufferDict(default=torch.randn(2 * WIDTH, 4)),
        )
        for b in self.blocks:
            b.up, b.down = Vera(b.up, A, B), Vera(b.down, A, B)


@trains(SECTION, "some tokens train: `weight.index_copy(0, tokens, delta)`")
class NewTokens(Small):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.token_indices = [3, 5]
        self.delta = nn.Parameter(torch.randn(2, WIDTH))

    def body(self, ids: Tensor) -> Any:
        W = self.embed.weight
        index = torch.tensor(self.token_indices).to(W.device)
        W = W.index_copy(dim=0, index=index, source=self.delta.to(W.dtype))
        return self.head(self.hidden(nn.functional.embedding(ids, W)))

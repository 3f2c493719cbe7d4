from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from autopar import CaptureError, NotSupportedError
from tests.habits.table import ALL, VOCABULARY, WIDTH, Block, Run, Small, adamw, habit
from tests.habits.adapters import of_learning, SECTION, LoraLinear, Wrapped

def merging_layer(run):
    pass

@habit(SECTION, "`layer.merge()` of a layer of pm", "X", kind=Wrapped, refused=(NotSupportedError, "X"))
def merged_layer(run: Run) -> None:
    run.train(of_learning(run))
    for m in run.both():
        m.base_model.blocks[0].up.merge()
    run.pm.eval()
    run.losses.append((run.pm.loss(**run.batch(0)).item(), run.alone(**run.batch(0)).item()))
    run.check()

class ModulesToSave(nn.Module):
    def __init__(self, module: nn.Module, name="default"):
        super().__init__()
        import copy
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({name: copy.deepcopy(module)})
        self._active_adapter = [name]
        self.original_module.requires_grad_(False)
        self.modules_to_save.requires_grad_(True)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        modules = self.__dict__["_modules"]
        return getattr(modules["modules_to_save"][self._active_adapter[0]], name)

    def forward(self, *args, **kwargs):
        return self.modules_to_save[self._active_adapter[0]](*args, **kwargs)

class Saved(Wrapped):
    def __init__(self):
        super().__init__()
        self.base_model.head = ModulesToSave(self.base_model.head)

@habit(SECTION, "modules_to_save", kind=Saved, layouts=ALL)
def modules_to_save(run):
    run.train(of_learning(run))
    assert "base_model.head.original_module.weight" in dict(run.alone.named_parameters())

class Prompted(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.prompt = nn.Embedding(2, WIDTH)
        self.register_buffer("prompt_tokens", torch.arange(2), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    def forward(self, ids, targets):
        prompts = self.prompt_tokens.unsqueeze(0).expand(ids.shape[0], -1)
        prompts = self.mlp(self.prompt(prompts))
        h = torch.cat((prompts, self.embed(ids)), dim=1)
        prefix = torch.full((ids.shape[0], 2), -100).to(targets.device)
        labels = torch.cat((prefix, targets), dim=1)
        for b in self.blocks: h = b(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())

@habit(SECTION, "prompt tuning", kind=Prompted, layouts=ALL)
def prompt_tuning(run):
    run.train(of_learning(run))

class Attending(nn.Module):
    """attention w/ past key values"""
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
    def forward(self, h, past):
        heads = lambda x: x.view(x.shape[0], -1, 2, WIDTH // 2).transpose(1, 2)
        q, k, v = heads(self.q(h)), heads(self.k(h)), heads(self.v(h))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        n, p = h.shape[1], past[0].shape[2]
        mask = torch.ones(n, n + p, dtype=torch.bool).tril(p)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return h + self.o(out.transpose(1, 2).flatten(2))

class Prefixed(Small):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList(Attending() for _ in range(2))
        self.requires_grad_(False)
        self.prefix = nn.Embedding(3, 2 * 2 * WIDTH)
    def body(self, ids):
        h = self.embed(ids)
        past = self.prefix(torch.arange(3).unsqueeze(0).expand(ids.shape[0], -1).to(ids.device))
        past = past.view(ids.shape[0], 3, 4, 2, WIDTH // 2).permute([2, 0, 3, 1, 4]).split(2)
        for i, b in enumerate(self.blocks):
            h = b(self.attention[i](h, past[i]))
        return self.head(h)

@habit(SECTION, "prefix tuning", kind=Prefixed, layouts=ALL)
def prefix_tuning(run):
    run.train(of_learning(run))

class IA3(nn.Module):
    def __init__(self, base, feedforward):
        super().__init__()
        self.base_layer = base
        self.is_feedforward = feedforward
        size = (1, base.in_features) if feedforward else (base.out_features, 1)
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.randn(size))})
        self.active_adapters = ["default"]
    def forward(self, x):
        ia3_scaling = 1
        for name in self.active_adapters:
            if name not in self.ia3_l.keys():
                continue
            ia3_scaling *= self.ia3_l[name].flatten()
        if self.is_feedforward:
            return self.base_layer((x * ia3_scaling).to(x.dtype))
        result = self.base_layer(x)
        return (result * ia3_scaling).to(result.dtype)

class Scaled(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for b in self.blocks:
            b.up, b.down = IA3(b.up, False), IA3(b.down, True)

@habit(SECTION, "IA3", kind=Scaled, layouts=ALL)
def ia3(run):
    run.train(of_learning(run))

class Dora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features, bias=False)
        self.scaling = {"default": 0.5}
        self._cache = {}
        with torch.no_grad():
            self.weight = nn.Parameter(torch.linalg.norm(base.weight + 0.5 * self.lora_B.weight @ self.lora_A.weight, dim=1).clone())
    def forward(self, x):
        x_eye = torch.eye(self.lora_A.weight.shape[1], device=x.device, dtype=x.dtype)
        lora_weight = self.lora_B(self.lora_A(x_eye)).T
        weight = self.base_layer.weight
        norm = torch.linalg.norm(weight + self.scaling["default"] * lora_weight.detach(), dim=1).to(weight.dtype)
        norm = norm.detach()
        scale = (self.weight / norm).view(1, -1)
        result = self.base_layer(x)
        bias = self.base_layer.bias
        base_result = result - bias if bias is not None else result
        return result + (scale - 1) * base_result + scale * self.lora_B(self.lora_A(x)) * self.scaling["default"]
RANK = 2
class DoraModel(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for b in self.blocks:
            b.up, b.down = Dora(b.up), Dora(b.down)

@habit(SECTION, "DoRA", kind=DoraModel, layouts=ALL)
def dora(run):
    run.train(of_learning(run))

class Vera(nn.Module):
    def __init__(self, base, A, B):
        super().__init__()
        self.base_layer = base
        self.vera_A, self.vera_B = A, B
        self.d = nn.Parameter(torch.full((4,), 0.1))
        self.b = nn.Parameter(torch.ones(base.out_features))
    def forward(self, x):
        A = self.vera_A["default"][:, :x.shape[-1]]
        B = self.vera_B["default"][:self.base_layer.out_features]
        F = nn.functional
        return self.base_layer(x) + self.b * F.linear(self.d * F.linear(x, A), B)

class BufferDict(nn.Module):
    def __init__(self, **values):
        super().__init__()
        for k, v in values.items():
            self.register_buffer(k, v)
    def __getitem__(self, k):
        return self._buffers[k]

class VeraModel(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        A, B = BufferDict(default=torch.randn(4, 2 * WIDTH)), BufferDict(default=torch.randn(2 * WIDTH, 4))
        for b in self.blocks:
            b.up, b.down = Vera(b.up, A, B), Vera(b.down, A, B)

@habit(SECTION, "VeRA shared buffers", kind=VeraModel, layouts=ALL)
def vera(run):
    run.train(of_learning(run))

class HadaWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w1a, w1b, w2a, w2b, scale):
        ctx.save_for_backward(w1a, w1b, w2a, w2b, scale)
        return ((w1a @ w1b) * (w2a @ w2b)) * scale
    @staticmethod
    def backward(ctx, grad_out):
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
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        o, i = base.weight.shape
        self.w1a, self.w2a = nn.Parameter(torch.randn(o, 2)), nn.Parameter(torch.randn(o, 2))
        self.w1b, self.w2b = nn.Parameter(torch.randn(2, i)), nn.Parameter(torch.randn(2, i))
    def forward(self, x):
        w = HadaWeight.apply(self.w1a, self.w1b, self.w2a, self.w2b, torch.tensor(0.5))
        return self.base_layer(x) + nn.functional.linear(x, w)

class LohaModel(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for b in self.blocks:
            b.up, b.down = Loha(b.up), Loha(b.down)

@habit(SECTION, "LoHa Function", kind=LohaModel, layouts=ALL)
def loha(run):
    import warnings
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*HadaWeight")
        run.train(of_learning(run))

class Lokr(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        o, i = base.weight.shape
        self.w1 = nn.Parameter(torch.randn(2, 2))
        self.w2 = nn.Parameter(torch.randn(o // 2, i // 2))
    def forward(self, x):
        return self.base_layer(x) + nn.functional.linear(x, torch.kron(self.w1, self.w2.contiguous()))

class LokrModel(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for b in self.blocks:
            b.up, b.down = Lokr(b.up), Lokr(b.down)

@habit(SECTION, "LoKr kron", kind=LokrModel, layouts=ALL)
def lokr(run):
    run.train(of_learning(run))

class Oft(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        i = base.in_features
        self.blocks = 2
        self.R = nn.Parameter(torch.randn(2, i // 2, i // 2))
    def forward(self, x):
        skew = 0.5 * (self.R - self.R.transpose(1, 2))
        eye = torch.eye(skew.shape[1]).unsqueeze(0).expand_as(skew).to(skew)
        q = torch.linalg.solve(eye + skew, eye - skew, left=False)
        rot = torch.block_diag(*[q[i] for i in range(2)])
        return nn.functional.linear(x, self.base_layer.weight @ rot, self.base_layer.bias)

class OftModel(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for b in self.blocks:
            b.up = Oft(b.up)

@habit(SECTION, "OFT Cayley", kind=OftModel, layouts=ALL)
def oft(run):
    run.train(of_learning(run))

class NewTokens(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.token_indices = [3, 5]
        self.delta = nn.Parameter(torch.randn(2, WIDTH))
    def body(self, ids):
        W = self.embed.weight
        index = torch.tensor(self.token_indices).to(W.device)
        W = W.index_copy(dim=0, index=index, source=self.delta.to(W.dtype))
        h = nn.functional.embedding(ids, W)
        for b in self.blocks: h = b(h)
        return self.head(h)

@habit(SECTION, "trainable tokens index_copy", kind=NewTokens, layouts=ALL)
def trainable_tokens(run):
    run.train(of_learning(run))

class AdaLora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.A, self.E, self.B = nn.Parameter(torch.randn(4, base.in_features)), nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.randn(base.out_features, 4))
        self.ranknum = nn.Parameter(torch.tensor(4.0), requires_grad=False)
    def forward(self, x):
        return self.base_layer(x) + (x @ (self.A * self.E).T @ self.B.T) * 0.5 / (self.ranknum + 1e-5)

class AdaModel(Small):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for b in self.blocks:
            b.up, b.down = AdaLora(b.up), AdaLora(b.down)
    def forward(self, ids, targets):
        loss = super().forward(ids, targets)
        regu, num = 0, 0
        for n, p in self.named_parameters():
            if ".A" in n or ".B" in n:
                cov = p @ p.T if ".A" in n else p.T @ p
                I = torch.eye(*cov.size(), out=torch.empty_like(cov))
                I.requires_grad = False
                num += 1
                regu += torch.norm(cov - I, p="fro")
        return loss + 0.1 * regu / num

@habit(SECTION, "AdaLoRA: orthogonal regu", kind=AdaModel, layouts=ALL)
def adalora(run):
    run.train(of_learning(run))

@habit(SECTION, "AdaLoRA: masking small singular values", kind=AdaModel, layouts=ALL)
def adalora_mask(run):
    opts = of_learning(run)
    for seed in range(2):
        run.backward(run.batch(seed))
        for o in opts: o.step()
        for m in run.both():
            with torch.no_grad():
                for n, p in m.named_parameters():
                    if n.endswith(".E"):
                        ipt = (p * p.grad).abs().detach()
                        p.masked_fill_(ipt <= 1e-3, 0.0)
        for o in opts: o.zero_grad()

class InputGrads(Wrapped):
    pass

@habit(SECTION, "enable_input_require_grads hook", kind=Wrapped, layouts=ALL)
def input_grads(run):
    for m in (run.model, run.alone):
        m.base_model.embed.register_forward_hook(lambda module, input, output: output.requires_grad_(True))
    run.train(of_learning(run))

@habit(SECTION, "LoRA+: groups", kind=Wrapped, layouts=ALL)
def lora_plus(run):
    def make(m):
        b = [p for n, p in m.named_parameters() if "lora_B" in n]
        a = [p for n, p in m.named_parameters() if "lora_A" in n]
        return torch.optim.AdamW([{"params": a, "lr": 1e-3}, {"params": b, "lr": 1.6e-2}])
    run.train([make(m) for m in run.both()])

@habit(SECTION, "print_trainable_parameters", kind=Wrapped, layouts=("tp", "zero3"))
def count_trainable(run):
    c = [(sum(p.numel() for p in m.parameters() if p.requires_grad), sum(p.numel() for p in m.parameters())) for m in run.both()]
    assert c[0] == c[1]
    run.train(of_learning(run))

@habit(SECTION, "weighted adapter: combined in place on pm", kind=TwoA if False else Wrapped)
def add_weighted(run):
    run.train(of_learning(run))
    for m in run.both():
        with torch.no_grad():
            for n, p in m.named_parameters():
                if "lora_A" in n:
                    p.data = 0.5 * p.data + 0.5 * torch.ones_like(p)
    run.train(of_learning(run), first=5)

class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))
    def forward(self, x):
        size_out = x.size()[:-1] + (self.weight.shape[1],)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)

class LoraEmbedding(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(RANK, base.num_embeddings))})
        self.lora_embedding_B = nn.ParameterDict({"default": nn.Parameter(torch.randn(base.embedding_dim, RANK))})
    def forward(self, x):
        A, B = self.lora_embedding_A["default"].T, self.lora_embedding_B["default"].T
        base = self.base_layer
        after_A = nn.functional.embedding(x, A, padding_idx=base.padding_idx, max_norm=base.max_norm, norm_type=base.norm_type, scale_grad_by_freq=base.scale_grad_by_freq, sparse=base.sparse)
        return base(x) + (after_A @ B) * 0.5

class EmbModel(Small):
    def __init__(self):
        super().__init__()
        for b in self.blocks: b.up = Conv1D(2 * WIDTH, WIDTH)
        self.requires_grad_(False)
        self.embed = LoraEmbedding(self.embed)

@habit(SECTION, "LoRA embedding ParameterDict, Conv1D", kind=EmbModel, layouts=ALL)
def lora_embedding(run):
    run.train(of_learning(run))

@habit(SECTION, "LoRA parametrization: nn.utils.parametrize", layouts=ALL)
def lora_parametrized(run):
    class P(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = nn.Parameter(torch.randn(RANK, i).double()), nn.Parameter(torch.randn(o, RANK).double())
            self.enabled = True
        def forward(self, w):
            return w + self.b @ self.a if self.enabled else w
    for m in (run.model, run.alone):
        for b in m.blocks:
            nn.utils.parametrize.register_parametrization(b.up, "weight", P(WIDTH, 2 * WIDTH))
            b.up.parametrizations.weight.original.requires_grad_(False)
    run.train(of_learning(run))

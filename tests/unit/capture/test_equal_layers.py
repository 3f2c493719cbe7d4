"""Tracing one of equal layers gives the graph of tracing all of them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, ViTModel

from autopar.capture.findings import Findings
from autopar.capture.trace.checkpointed import REGION
from autopar.capture.trace.export import Traced, export_model
from tests.helpers.nightly import nightly

N = 6
MARKS = ("stack_trace", "grad_enabled", "seeded")


def text_of(graph: fx.Graph) -> list[object]:
    """All that later steps of capture read of a trace; numbers of regions by first place."""
    regions: dict[object, int] = {}
    memories: dict[int, int] = {}
    has_writes = any(
        node.target._schema.is_mutable
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )

    def memory(value: Tensor) -> int:
        """The first tensor in this memory; 0 if nothing is written in place."""
        place = memories.setdefault(value.untyped_storage()._cdata, len(memories))
        return place if has_writes else 0

    def line(node: fx.Node) -> object:
        values = [
            (tuple(v.shape), v.stride(), v.dtype, v.requires_grad, memory(v))
            if isinstance(v, Tensor)
            else v
            for v in pytree.tree_leaves(node.meta.get("val"))
        ]
        region = node.meta.get(REGION)
        number = None if region is None else regions.setdefault(region, len(regions))
        stack = [*(node.meta.get("nn_module_stack") or {}).items()]
        marks = [node.meta.get(key) for key in MARKS]
        names = fx.node.map_arg((node.args, node.kwargs), lambda n: places[n])
        return node.op, str(node.target), str(names), str(values), number, stack, marks

    places = {node: number for number, node in enumerate(graph.nodes)}
    return [*map(line, graph.nodes)]


def traces(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None = None
) -> tuple[Traced, Traced]:
    made = [
        export_model(
            model, batch, findings, training=True, loss_fn=loss_fn, layers_once=layers_once
        )
        for layers_once in (True, False)
        for findings in [Findings()]
    ]
    return made[0], made[1]


def check(
    model: nn.Module, batch: Any, n_copies: int, loss_fn: Callable[..., Tensor] | None = None
) -> None:
    """The graphs and what was read are equal; `n_copies` layers were not traced."""
    once, whole = traces(model, batch, loss_fn)
    assert text_of(once.graph) == text_of(whole.graph)
    assert once.reads == whole.reads
    assert (once.n_copies, whole.n_copies) == (n_copies, 0)


def mean(output: Any, batch: Any) -> Tensor:
    """The loss of a stack below."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first.square().mean()


def tokens() -> dict[str, Tensor]:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def causal(family: str, **sizes: Any) -> nn.Module:
    config = AutoConfig.for_model(family, **{**sizes, "use_cache": False})
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


@nightly
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_llama(is_checkpointed: bool) -> None:
    model = causal("llama", num_hidden_layers=N, **SMALL)
    if is_checkpointed:
        model.activation_checkpointing_enable()  # type: ignore[operator]
    check(model, tokens(), N - 2)


@nightly
def test_gpt2_with_dropout() -> None:
    check(causal("gpt2", n_layer=N, n_embd=16, n_head=2, vocab_size=32), tokens(), N - 2)


@nightly
def test_mixtral() -> None:
    check(
        causal("mixtral", num_hidden_layers=N, num_local_experts=2, num_key_value_heads=2, **SMALL),
        tokens(),
        N - 2,
    )


@nightly
def test_attention_of_two_kinds() -> None:
    """Sliding windows in every other layer."""
    kinds = ["sliding_attention", "full_attention"] * (N // 2)
    model = causal(
        "gemma3_text", num_hidden_layers=N, layer_types=kinds, head_dim=8, sliding_window=4,
        num_key_value_heads=1, **SMALL,
    )  # fmt: skip
    once, whole = traces(model, tokens())
    assert text_of(once.graph) == text_of(whole.graph)
    assert once.reads == whole.reads


@nightly
def test_two_stacks() -> None:
    """The first layer of a T5 has a table of positions, so it is unlike the others."""
    config = AutoConfig.for_model(
        "t5", d_model=16, d_ff=32, num_layers=N, num_decoder_layers=N, num_heads=2, d_kv=8,
        vocab_size=32, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    once, whole = traces(AutoModelForSeq2SeqLM.from_config(config).train(), tokens())
    assert text_of(once.graph) == text_of(whole.graph)
    assert once.reads == whole.reads


@nightly
def test_vit() -> None:
    config = AutoConfig.for_model(
        "vit", hidden_size=16, intermediate_size=32, num_hidden_layers=N, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    model = ViTModel(config, add_pooling_layer=False).train()
    batch = {"pixel_values": torch.zeros(2, 3, 8, 8)}
    check(model, batch, N - 2, lambda out, _: out.last_hidden_state.square().mean())


@nightly
def test_encoder_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, N, enable_nested_tensor=False)
    check(model, (torch.zeros(2, 4, 16),), N - 3, mean)


class Plain(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu()


class Indexed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.index + 1)


class IndexedInDict(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (vars(self)["index"] + 1)


class IndexedInObject(Plain):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.settings = type("Settings", (), {})()
        self.settings.index = index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.index


class Alternating(Plain):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = 1.0 + index % 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


_DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)


class KnownByContext(Plain):
    """Which layer it is, only a variable of the context says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * _DEPTH.get()


class Frozen(Plain):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.linear.requires_grad_(index != 2)


class WithBuffer(Plain):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("shift", torch.full((4,), float(index)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class Counting(Plain):
    n: Tensor

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return super().forward(x) * self.n


class Stochastic(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(super().forward(x), 0.1 * (self.index % 2) + 0.1)
        return x + torch.rand_like(x)


class Several(Plain):
    """Returns two tensors, of which one is read by the first layer only."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.sum(-1).detach()


class InPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu_()


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        with torch.no_grad():
            shift = x.mean()
        return y + shift


class Stack(nn.Module):
    def __init__(self, kind: type[Plain]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(index) for index in range(N))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Skipping(Stack):
    """Every layer reads the input, and the fourth what the second returned."""

    def forward(self, x: Tensor) -> Tensor:
        first, kept = x, list[Tensor]()
        for number, layer in enumerate(self.layers):
            x = layer(x + (kept[1] if number == 3 else first))
            kept.append(x)
        return x + kept[0]


class Growing(Stack):
    """A list that layers are given grows."""

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for layer in self.layers:
            x = layer(x + sum(cache))
            cache.append(x)
        return torch.cat(cache)


class Unrolled(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x)
        x = self.layers[2](x)
        for layer in list(self.layers)[3:]:
            x = layer(x)
        return x


class InContext(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            token = _DEPTH.set(number)
            x = layer(x)
            _DEPTH.reset(token)
        return x


class UsesOnce(Stack):
    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x, other = layer(x)
            found.append(other)
        return x + found[0].unsqueeze(-1)


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class UnderNoGrad(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(number > 1):
                x = layer(x)
        return x


class PartlyCheckpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number % 2 == 1 else layer(x)
        return x


class Widening(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([layer(x), x])
        return x


def hooked(n_hooked: int) -> nn.Module:
    model = Stack(Plain)
    model.layers[n_hooked].linear.register_forward_hook(lambda m, a, out: out * 2)  # type: ignore[union-attr]
    return model


def tied() -> nn.Module:
    model = Stack(Plain)
    for layer in model.layers:
        layer.linear.bias = model.layers[0].linear.bias  # type: ignore[union-attr]
    return model


def random_alike() -> nn.Module:
    model = Stack(Stochastic)
    for layer in model.layers:
        layer.index = 0  # type: ignore[assignment]
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (lambda: Stack(Plain), N - 3),
    "index read": (lambda: Stack(Indexed), 0),
    "index read from __dict__": (lambda: Stack(IndexedInDict), 0),
    "index within an object": (lambda: Stack(IndexedInObject), 0),
    "alternating": (lambda: Stack(Alternating), 2),
    "index from the context": (lambda: InContext(KnownByContext), 0),
    "one frozen": (lambda: Stack(Frozen), N - 4),
    "buffers": (lambda: Stack(WithBuffer), N - 3),
    "changed buffers": (lambda: Stack(Counting), 0),
    "random": (lambda: Stack(Stochastic), 0),
    "random, one rate": (lambda: random_alike(), N - 3),
    "in place": (lambda: Stack(InPlace), N - 3),
    "checkpointed, no_grad": (lambda: Stack(Checkpointed), N - 3),
    "some checkpointed": (lambda: PartlyCheckpointed(Plain), 0),
    "skip connections": (lambda: Skipping(Plain), N - 3),
    "a list that grows": (lambda: Growing(Plain), N - 3),
    "from several lines": (lambda: Unrolled(Plain), 0),
    "a result read once": (lambda: UsesOnce(Several), N - 3),
    "twice": (lambda: Twice(Plain), N - 3),
    "gradients off for some": (lambda: UnderNoGrad(Plain), 2),
    "shapes that grow": (lambda: Widening(Plain), 0),
    "a hook": (lambda: hooked(3), N - 4),
    "tied": (tied, N - 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers(name: str) -> None:
    make, n_copies = MODELS[name]
    check(make(), (torch.zeros(2, 4),), n_copies, mean)

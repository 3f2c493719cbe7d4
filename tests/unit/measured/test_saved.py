"""What autograd saves for backward: fake runs against real ones, per operator and per model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.capture import capture, reference_step
from autopar.errors import NotSupportedError
from autopar.measured import Saved, saved_for_backward, storage_owners
from autopar.measured.saved import activation_bytes
from tests.helpers.jobs import gpt2, tokens
from tests.helpers.saved import Draft, address, really_saved, saved_of

aten = torch.ops.aten
B, S, H, D, V = 2, 6, 4, 8, 11
SUM = 2  # aten's reduction codes


def x(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, V, shape)


def heads(n: int = H, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(b, h, s, d) with the strides that a projection leaves, (b, s, h, d)."""
    return x(B, S, n, D, grad=False, dtype=dtype).transpose(1, 2).requires_grad_()


def saved(inputs: set[int], outputs: set[int] | None = None, other_bytes: int = 0) -> Saved:
    return Saved(frozenset(inputs), frozenset(outputs or ()), other_bytes)


SDPA = aten.scaled_dot_product_attention.default
SQUARE = x(3, 3)

# What autograd really saves, so that the real run is itself known to be measured right.
KNOWN: dict[str, tuple[Any, tuple[Any, ...], Saved]] = {
    "linear, frozen weight": (aten.linear.default, (x(2, 5), x(7, 5, grad=False)), saved({1})),
    "mm": (aten.mm.default, (x(3, 5), x(5, 7)), saved({0, 1})),
    "add": (aten.add.Tensor, (x(3, 5), x(5)), saved(set())),
    "relu": (aten.relu.default, (x(3, 5),), saved(set(), {0})),
    "max over a dim": (aten.max.dim, (x(3, 5), 1), saved(set(), {1})),
    "dropout": (aten.dropout.default, (x(3, 5), 0.5, True), saved(set(), set(), 3 * 5 * 4)),
    "attention with a bool mask": (
        SDPA,
        (heads(), heads(), heads(), torch.ones(S, S, dtype=torch.bool)),
        saved({0, 1, 2}, {0}, B * H * S * 4 + S * S * 4),
    ),
}
BF16 = torch.bfloat16

# Every operator with a rule is asked in `tests/rules/test_rule_oracle.py`; these have
# other dtypes and strides.
LIKE_REAL: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "linear, plain input": (aten.linear.default, (x(2, 5, grad=False), x(7, 5)), {}),
    "mm with itself": (aten.mm.default, (SQUARE, SQUARE), {}),
    "cast": (aten.to.dtype, (x(3, 5), BF16), {}),
    "bf16 layer_norm": (
        aten.layer_norm.default,
        (x(3, 5, dtype=BF16), [5], x(5, dtype=BF16), x(5, dtype=BF16)),
        {},
    ),
    "bf16 attention": (SDPA, tuple(heads(dtype=BF16) for _ in range(3)), {}),
    "fp32 attention, float mask": (SDPA, (heads(), heads(), heads(), x(S, S, grad=False)), {}),
    "grouped attention": (SDPA, (heads(), heads(2), heads(2)), {"enable_gqa": True}),
    "attention with dropout": (SDPA, (heads(), heads(), heads(), None, 0.5), {}),
    "attention, learned mask": (SDPA, (heads(), heads(), heads(), x(H, S, S)), {}),
    "attention, values without gradient": (SDPA, (heads(), heads(), heads().detach()), {}),
    "cross_entropy, bf16": (aten.cross_entropy_loss.default, (x(6, V, dtype=BF16), ids(6)), {}),
}

VIEWS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.transpose.int, (0, 1)),
    (aten.permute.default, ([1, 0, 2],)),
    (aten.view.default, ([6, 8],)),
    (aten.reshape.default, ([6, 8],)),
    (aten.unsqueeze.default, (0,)),
    (aten.slice.Tensor, (2, 1, 5)),
    (aten.select.int, (0, 1)),
    (aten.to.dtype, (torch.float32,)),
]


class TestOperators:
    @pytest.mark.parametrize("name", KNOWN)
    def test_known(self, name: str) -> None:
        op, args, expected = KNOWN[name]
        assert saved_of(op, *args) == expected
        assert really_saved(op, *args) == expected

    @pytest.mark.parametrize("name", LIKE_REAL)
    def test_like_a_real_run(self, name: str) -> None:
        op, args, kwargs = LIKE_REAL[name]
        assert saved_of(op, *args, **kwargs) == really_saved(op, *args, **kwargs)

    def test_without_gradient_nothing_is_saved(self) -> None:
        assert saved_of(aten.mm.default, x(3, 5, grad=False), x(5, 7, grad=False)) == Saved()

    def test_under_no_grad_the_answer_is_the_same(self) -> None:
        with torch.no_grad():
            assert saved_of(aten.relu.default, x(3, 5)) == saved(set(), {0})

    def test_an_operator_that_cannot_run_is_named(self) -> None:
        with torch.library._scoped_library("autopar_test", "FRAGMENT") as library:
            library.define("opaque(Tensor x) -> Tensor")
            library.impl("opaque", torch.clone, "CPU")
            draft = Draft()
            leaf = draft.leaf(x(3, 5))
            node = draft.graph.call_function(torch.ops.autopar_test.opaque.default, (leaf,))
            node.meta["val"] = leaf.meta["val"]
            draft.has_grad.add(node.name)
            with pytest.raises(NotSupportedError, match=r"autopar_test\.opaque") as caught:
                saved_for_backward(draft.program(node))
            assert "register_fake" in str(caught.value)


def test_equal_calls_are_run_once() -> None:
    """By their shapes, so that the time does not grow with the number of layers."""
    shapes = []

    def counted(value: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(value.shape))
        return value.sin()

    with torch.library._scoped_library("autopar_test", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", counted, "CompositeImplicitAutograd")
        draft = Draft()
        node = draft.leaf(x(3, 5))
        for _ in range(3):
            node = draft.call(torch.ops.autopar_test.counted.default, node)
        other = draft.call(torch.ops.autopar_test.counted.default, draft.leaf(x(2, 5)))
        shapes.clear()
        saved_for_backward(draft.program(node, other))
    assert sorted(shapes) == [(2, 5), (3, 5)]


class TestViews:
    @pytest.mark.parametrize(("view", "args"), VIEWS)
    def test_a_view_saves_nothing_and_its_storage_is_the_inputs(
        self, view: Any, args: tuple[Any, ...]
    ) -> None:
        draft = Draft()
        source = draft.leaf(x(2, 3, 8))
        node = draft.call(view, source, *args)
        power = draft.call(aten.pow.Tensor_Scalar, node, 3.0)
        program = draft.program(power)
        assert saved_for_backward(program)[node.name] == Saved()
        assert storage_owners(program) == {
            source.name: source.name,
            node.name: source.name,
            power.name: power.name,
        }
        assert activation_bytes(program) == 2 * 3 * 8 * 4

    def test_parts_of_a_split_are_one_storage(self) -> None:
        draft = Draft()
        source = draft.call(aten.relu.default, draft.leaf(x(4, 6)))
        split = draft.call(aten.split.Tensor, source, 3, 1)
        parts = [draft.call(operator.getitem, split, i) for i in range(2)]
        program = draft.program(draft.call(aten.mul.Tensor, *parts))
        owners = storage_owners(program)
        assert [owners[part.name] for part in parts] == [source.name, source.name]
        assert split.name not in owners
        assert activation_bytes(program) == 4 * 6 * 4

    def test_a_reshape_that_copies_has_its_own_storage(self) -> None:
        draft = Draft()
        turned = draft.call(aten.transpose.int, draft.leaf(x(3, 5)), 0, 1)
        copy = draft.call(aten.reshape.default, turned, [15])
        program = draft.program(draft.call(aten.pow.Tensor_Scalar, copy, 3.0))
        assert storage_owners(program)[copy.name] == copy.name

    def test_a_result_that_nothing_takes_counts(self) -> None:
        draft = Draft()
        best = draft.call(aten.max.dim, draft.leaf(x(3, 5)), 1)
        value = draft.call(operator.getitem, best, 0)
        assert activation_bytes(draft.program(value)) == 3 * 8


def really_kept_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Bytes of the distinct storages that autograd saves in a run, without parameters."""
    packed: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.setdefault(address(tensor), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    parameters = {address(p) for p in model.parameters()}
    return sum(t.untyped_storage().nbytes() for at, t in packed.items() if at not in parameters)


class TestModel:
    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    def test_gpt2_against_real_runs(self, dropout: float) -> None:
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        model, inputs = gpt2(2, use_cache=False, **drop), tokens(0)
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, 5:] = 0  # so that eager also needs an explicit mask
        inputs["attention_mask"] = mask
        program = capture(model, inputs)
        predicted_bytes = activation_bytes(program)
        parameters = dict(model.named_parameters())
        captured_bytes = really_kept_bytes(
            model, lambda: reference_step(program, parameters, inputs)
        )
        assert predicted_bytes == captured_bytes
        eager_bytes = really_kept_bytes(model, lambda: model(**inputs))
        if dropout:  # eager saves masks; the captured operator draws them again
            assert predicted_bytes < eager_bytes
        else:
            assert predicted_bytes == pytest.approx(eager_bytes, rel=0.02)

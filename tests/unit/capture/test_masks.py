"""Masks of attention: which become a flag, which are made for one row, which stay; their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import PlanError
from autopar.capture import capture
from autopar.capture.attention import PiecewiseMask
from autopar.operators import ATTENTION_DROPOUT
from autopar.program.graph import Program
from tests.helpers.capture_harness import Module, check
from tests.helpers.jobs import CASES
from tests.helpers.whole_steps import WholeStep

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
N, WIDTH, HEADS, ROWS = 5, 4, 2, 3
LOWEST = torch.finfo(torch.float32).min


def attending(make_mask: Callable[..., Any], **options: Any) -> nn.Module:
    """Attention of x to itself, with two heads, under `make_mask(self, x)`."""

    def body(self: Any, x: Tensor, *rest: Tensor) -> Tensor:
        h = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mask = make_mask(self, x, *rest)
        return F.scaled_dot_product_attention(h, h, h, mask, **options).sin().sum()

    model = Module(body)
    model.register_buffer("shape", torch.ones(2 * N, 2 * N, dtype=torch.bool).tril())
    return model


def xs(n: int = N, rows: int = 2) -> Tensor:
    return torch.randn(rows, n, WIDTH, dtype=torch.float64)


def lower(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def by_position(self: nn.Module, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return at[:, None] >= at[None, :]


def per_row(self: nn.Module, x: Tensor) -> Tensor:
    """As `transformers` makes it: positions of every row of the batch."""
    at = torch.arange(x.shape[1]).unsqueeze(0).expand(len(x), -1)
    document = (at.diff(dim=1, prepend=at[:, :1] - 1) != 1).cumsum(-1)
    is_same = document[:, None, :, None] == document[:, None, None, :]
    return is_same & (at[:, None, None, :] <= at[:, None, :, None])


def added(value: float) -> Callable[..., Tensor]:
    def make(self: nn.Module, x: Tensor) -> Tensor:
        zeros = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
        return zeros.masked_fill(~lower(x), value)

    return make


CAUSAL: dict[str, Callable[..., Any]] = {
    "tril": lambda self, x: lower(x),
    "by position": by_position,
    "per row": per_row,
    "-inf": added(-torch.inf),
    "the lowest number": added(LOWEST),
    "the lowest float64": added(torch.finfo(torch.float64).min),
    "where": lambda self, x: torch.where(by_position(self, x), 0.0, -torch.inf).double(),
    "expanded": lambda self, x: lower(x).expand(len(x), 1, N, N),
    "a buffer": lambda self, x: self.get_buffer("shape")[: x.shape[1], : x.shape[1]],
}
# Masks are looked at in blocks of 2**20 elements: these have two.
TWO_BLOCKS = 1100


def flags(model: nn.Module, *batch: Tensor) -> list[tuple[Any, ...]]:
    """(mask, is_causal) of each attention."""
    program = check(model, batch)
    found = []
    for node in program.operators:
        if node.target == ATTENTION:
            found.append((*node.args[3:4], *node.args[5:6]))
    return found


@pytest.mark.parametrize(
    ("name", "n"), [*((name, N) for name in CAUSAL), ("per row", TWO_BLOCKS), ("-inf", TWO_BLOCKS)]
)
def test_causal(name: str, n: int) -> None:
    model = attending(CAUSAL[name])
    assert flags(model, xs(n)) == [(None, True)]


FULL: dict[str, Callable[..., Any]] = {
    "ones": lambda self, x: torch.ones(N, N, dtype=torch.bool),
    "of keys": lambda self, x: torch.ones(len(x), 1, 1, N, dtype=torch.bool),
    "zeros": lambda self, x: torch.zeros(N, N, dtype=torch.float64),
}


@pytest.mark.parametrize("name", FULL)
def test_full(name: str) -> None:
    assert flags(attending(FULL[name]), xs()) == [(None, False)]


def window(self: nn.Module, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return by_position(self, x) & (at[:, None] - at[None, :] < len(at) - 1)


def last_shows_more(self: nn.Module, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return by_position(self, x) | (at[:, None] == len(at) - 2)


OTHERS: dict[str, Callable[..., Any]] = {
    "a window that hides one element": window,
    "one element more": last_shows_more,
    "upper": lambda self, x: lower(x).T,
    "strict": lambda self, x: lower(x) & ~torch.eye(N, dtype=torch.bool) | (torch.arange(N) == 0),
    "a bias": lambda self, x: added(-torch.inf)(self, x) - 0.5 * lower(x),
    "a finite number": added(-1e9),
    "of one row of the batch": lambda self, x: torch.stack(
        [lower(x), torch.ones(N, N, dtype=torch.bool)]
    ).unsqueeze(1),
}


@pytest.mark.parametrize(
    ("name", "n"), [*((name, N) for name in OTHERS), ("one element more", TWO_BLOCKS)]
)
def test_others_stay(name: str, n: int) -> None:
    ((mask, *is_causal),) = flags(attending(OTHERS[name]), xs(n))
    assert mask is not None and not any(is_causal)


def test_padding_of_an_input_stays() -> None:
    def padded(self: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
        return lower(x) & seen[:, None, None, :]

    seen = torch.ones(2, N, dtype=torch.bool)  # its values do not count
    ((mask, *is_causal),) = flags(attending(padded), xs(), seen)
    assert mask is not None and not any(is_causal)


def test_more_keys_than_queries_stay() -> None:
    """`is_causal` aligns the first row with the first key; this aligns the last ones."""

    def body(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x)
        mask = torch.ones(2, N, dtype=torch.bool).tril(N - 2)
        return F.scaled_dot_product_attention(h[:, -2:], h, h, mask).sum()

    ((mask, *is_causal),) = flags(Module(body), xs())
    assert mask is not None and not any(is_causal)


def test_attention_with_dropout_has_the_flag_too() -> None:
    program = capture(attending(by_position, dropout_p=0.5), (xs().float(),))
    (node,) = (n for n in program.operators if n.target == ATTENTION_DROPOUT)
    assert (node.args[3], node.args[8]) == (None, True)


def test_a_buffer_that_was_read_is_watched() -> None:
    """The mask is gone, but a write to its buffer still asks for another plan."""
    model = attending(CAUSAL["a buffer"])
    pm = autopar.parallelize(model, (1, 1), (xs().float(),))
    pm.step(xs().float())
    model.get_buffer("shape")[0, 1] = True
    what = "`shape` of the model's buffers changed"
    with pytest.warns(UserWarning, match=what), pytest.raises(PlanError, match=what):
        pm.step(xs().float())


def distances(self: nn.Module, x: Tensor) -> Tensor:
    """Causal, by a difference of rows and columns."""
    at = torch.arange(x.shape[1])
    return at[:, None] - at[None, :] >= 0


def every_other(self: nn.Module, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return (at[:, None] - at[None, :]) % 2 == 0


def on_meta(make_mask: Callable[..., Any], n: int) -> Program:
    with torch.device("meta"):
        model = attending(make_mask)
    return capture(model, (torch.empty(2, n, WIDTH, device="meta"),))


@pytest.mark.parametrize("make_mask", [by_position, per_row, distances])
def test_a_model_on_meta_of_any_length(make_mask: Callable[..., Any]) -> None:
    """131,072 tokens: of a comparison, every row is looked at where it changes alone."""
    for n in (N, 2**17):
        operators = on_meta(make_mask, n).operators
        ((mask, *others),) = (n.args[3:] for n in operators if n.target == ATTENTION)
        assert (mask, others) == (None, [0.0, True])


def test_a_mask_that_is_too_large_stays() -> None:
    """One of more than 2**32 elements, of which each is looked at."""
    program = on_meta(every_other, 2**16 + 1)
    ((mask, *others),) = (n.args[3:] for n in program.operators if n.target == ATTENTION)
    assert mask is not None and not any(others)
    assert "too large" in program.audit.kept[0].why


COMPARED = {
    "equal": lambda r, c: r >= c,
    "the other way round": lambda r, c: ~(c > r),
    "one later": lambda r, c: r + 1 >= c,
    "one earlier": lambda r, c: r > c,
    "a window": lambda r, c: (r >= c) & (r - 3 < c),
    "all but one": lambda r, c: (r >= c) & (c != 2),
    "one more": lambda r, c: (r >= c) | (c == 4),
    "documents": lambda r, c: (r >= c) & (r // 3 == c // 3),
    "one document": lambda r, c: (r >= c) & (r // 9 == c // 9),
    "all": lambda r, c: (r >= c) | (r < c),
    "falling columns": lambda r, c: -r <= -c,
    "steps": lambda r, c: r // 2 >= c // 2,
    "a number": lambda r, c: torch.where(r >= c, 0.0, -torch.inf).double(),
    "another number": lambda r, c: torch.where(r >= c, 0.0, -1.0).double(),
}


GONE = {"equal", "the other way round", "one document", "all", "falling columns", "a number"}


@pytest.mark.parametrize("name", COMPARED)
def test_looking_where_rows_change_finds_what_looking_everywhere_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(self: nn.Module, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        return COMPARED[name](at[:, None], at[None, :])

    def looked_at() -> tuple[bool, ...]:
        ((mask, *is_causal),) = flags(attending(compared), xs(7))
        return mask is None, *map(bool, is_causal)

    where_it_changes = looked_at()
    monkeypatch.setattr(PiecewiseMask, "of", lambda *args: None)
    assert where_it_changes == looked_at()
    assert where_it_changes[0] == (name in GONE)


def test_the_audit_says_so() -> None:
    audit = capture(attending(by_position), (xs().float(),)).audit
    assert [(n.what, n.why) for n in audit.replaced] == [("a causal mask", "`is_causal`")]


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is computed, fake ones apart."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.device.type == "cpu":
            self.n_bytes = max(self.n_bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("rows", "n"), [(64, 512), (1, 4096)])
def test_nothing_quadratic_is_made(rows: int, n: int) -> None:
    """These masks have 16 MiB; a block has 1."""
    model, x = attending(per_row), torch.randn(rows, n, WIDTH)
    with Largest() as largest:
        program = capture(model, (x,))
    assert [n.args[3:] for n in program.operators if n.target == ATTENTION] == [(None, 0.0, True)]
    assert 0 < largest.n_bytes <= 2**20


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_that_make_their_own(family: str) -> None:
    case = CASES[family]
    program = capture(case.model(), case.batch(0))
    found = [n.args[3:6] for n in program.operators if n.target == ATTENTION]
    assert found == [(None, 0.0, True)] * 2
    assert all(make().numel() < 1000 for make in program.constants.values())


# -- learned masks: made for one row of the batch where all rows are the same ----------------------


def biased(make_mask: Callable[..., Tensor], **options: Any) -> nn.Module:
    """With a learned bias per head, under `make_mask(bias, x)`."""
    model = attending(lambda self, x: make_mask(self.bias, x), **options)
    model.bias = nn.Parameter(torch.randn(1, HEADS, N, N))
    return model


REPEATED: dict[str, Callable[..., Tensor]] = {
    "mask of the batch": lambda bias, x: torch.where(
        lower(x).view(1, 1, N, N).expand(len(x), 1, N, N), bias, -1e9
    ),
    "mask without heads": lambda bias, x: torch.where(lower(x).expand(len(x), 1, N, N), bias, -1e9),
    "mask of queries": lambda bias, x: torch.where(
        (torch.arange(N) > 0).view(1, 1, N, 1).expand(len(x), 1, N, N), bias, -1e9
    ),
    "bias": lambda bias, x: bias.expand(len(x), HEADS, N, N).masked_fill(~lower(x), -1e9),
    "both, and more": lambda bias, x: (
        bias.expand(len(x), -1, -1, -1) * lower(x).expand(len(x), 1, N, N).to(bias.dtype)
    ).sin(),
}
OF_EACH_ROW: dict[str, Callable[..., Tensor]] = {
    "input": lambda bias, x: bias + x.mean(-1).view(len(x), 1, 1, N),
    "padding": lambda bias, x: torch.where((x[..., 0] > 0).view(len(x), 1, 1, N), bias, -1e9),
    "rows differ": lambda bias, x: torch.where(
        (torch.arange(len(x)) > 0).view(-1, 1, 1, 1), bias, 2 * bias
    ),
}


@pytest.mark.parametrize("name", [*REPEATED, *OF_EACH_ROW])
def test_a_learned_mask_that_repeats_is_made_once(name: str) -> None:
    program = check(biased((REPEATED | OF_EACH_ROW)[name]), (xs(rows=ROWS),))
    (mask,) = (n.args[3] for n in program.operators if n.target == ATTENTION)
    assert isinstance(mask, torch.fx.Node)
    assert mask.meta["val"].shape == (1 if name in REPEATED else ROWS, HEADS, N, N)


def test_attention_with_dropout_and_a_learned_mask_is_written_as_its_parts() -> None:
    model = biased(REPEATED["mask of the batch"], dropout_p=0.5)
    program = capture(model, (xs(rows=ROWS).float(),))
    shapes = {n.target: tuple(n.meta["val"].shape) for n in program.operators}
    assert shapes[torch.ops.aten.where.ScalarOther] == (1, HEADS, N, N)
    assert shapes[torch.ops.aten._safe_softmax.default] == (ROWS, HEADS, N, N)


@pytest.mark.parametrize("precision", ["model", "bf16-autocast"])
def test_nothing_of_the_bias_is_made_per_row(precision: str) -> None:
    program = capture(biased(REPEATED["bias"]), (xs(rows=ROWS).float(),), precision=precision)
    sizes = {n.meta["val"].numel() for n in program.operators if n.meta["val"].shape[-2:] == (N, N)}
    assert sizes == {HEADS * N * N}


TOKENS = 4096


class Long(nn.Module):
    """One layer of attention over many tokens."""

    def __init__(self, make_mask: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, HEADS * WIDTH) for _ in range(3))
        self.make_mask = make_mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for m in self.layers)
        return F.scaled_dot_product_attention(q, k, v, self.make_mask(self, x)).sin().sum()


def peaks(make_mask: Callable[..., Any]) -> tuple[float, float]:
    """(predicted, measured) peak of live bytes of a step with many tokens."""
    batch = {"x": torch.randn(1, TOKENS, WIDTH)}
    plan = autopar.plan(Long(make_mask), (1, 1), batch, microbatches=1)
    bound = plan.bound
    assert bound is not None
    step = WholeStep.of(bound.analysis.program, bound.pipeline, batch)
    constants = sum(value.nbytes for value in step.constants.values())  # alive before the step
    return plan.predicted.peak_bytes, step.bytes()[0] + constants


def test_memory_of_4096_tokens() -> None:
    """A mask that stays has 16 MiB; a step without one needs less than 4."""
    predicted, measured = peaks(by_position)
    assert predicted == pytest.approx(measured, rel=0.03)
    assert measured < 4 * 2**20
    predicted, measured = peaks(lambda self, x: by_position(self, x) | (torch.arange(TOKENS) == 1))
    assert predicted == pytest.approx(measured, rel=0.03)
    assert measured > 16 * 2**20

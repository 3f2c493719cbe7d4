"""A module under `PositionalRandom` draws the numbers that its captured program draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import PositionalRandom, capture, draws_of, reference_step
from autopar.capture.positional import UNSEEN
from tests.helpers.nightly import one_in

ROWS, WIDTH, SEED = 4, 8, 11


class Drawing(nn.Module):
    """Applies `draw` between two linear layers; the first part runs as `region` says."""

    def __init__(self, draw: Callable[[Tensor], Tensor], region: str = "plain") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.draw, self.region = draw, region

    def part(self, x: Tensor) -> Tensor:
        return self.draw(self.first(x)).sin()

    def forward(self, x: Tensor) -> Tensor:
        if self.region == "plain":
            h = self.part(x)
        else:
            h = checkpoint(self.part, x, use_reentrant=self.region == "reentrant")
        return self.last(F.dropout(h, 0.25)).square().sum()


def attention(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, WIDTH // 2)).transpose(0, 1)
    return (
        F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        .transpose(0, 1)
        .flatten(1)
    )


def in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        noise = torch.empty(ROWS, WIDTH).uniform_(-1, 1)
    return F.dropout(x + noise, 0.5, inplace=True)


def many_heads(x: Tensor) -> Tensor:
    """A function of torch that is written in Python and draws inside."""
    weight, eye = x.new_ones(3 * WIDTH, WIDTH) / WIDTH, torch.eye(WIDTH, dtype=x.dtype)
    out = F.multi_head_attention_forward(
        x[:, None], x[:, None], x[:, None], WIDTH, 2, weight, None, None, None, False, 0.5,
        eye, None,
    )  # fmt: skip
    return out[0][:, 0]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "by its operator": lambda x: torch.ops.aten.dropout.default(x, 0.5, True),
    "channels": lambda x: F.dropout1d(x, 0.5),
    "alpha": lambda x: F.feature_alpha_dropout(F.alpha_dropout(x, 0.5, True), 0.5, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": attention,
    "multi-head attention": many_heads,
    "in place": in_place,
    "gumbel": lambda x: F.gumbel_softmax(x),
    "normal": lambda x: (
        x + torch.randn(WIDTH) + torch.randn_like(x) * torch.normal(0.0, 1.0, (WIDTH,))
    ),
    "uniform": lambda x: x * torch.rand(ROWS, 1) + torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "order": lambda x: x[:, torch.randperm(WIDTH)] + torch.randint(0, 3, (WIDTH,)),
    "method": lambda x: (
        x.unflatten(1, (2, WIDTH // 2)).flatten(1) - x.new_empty(ROWS, 1).exponential_()
    ),
}


REGIONS = ("plain", "checkpointed", "reentrant")


@one_in(2)
@pytest.mark.parametrize("name", DRAWS)
def test_module_and_program_agree(name: str) -> None:
    torch.manual_seed(0)
    module, x = Drawing(DRAWS[name]).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    program = capture(module, {"x": x})
    leaves = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    wanted, _ = reference_step(program, leaves, {"x": x}, seed=SEED)
    assert wanted is not None
    wanted.backward()

    for region in REGIONS:
        module.region = region
        module.zero_grad()
        with torch.random.fork_rng(devices=()), PositionalRandom(SEED) as draw:
            loss = module(x.clone().requires_grad_(region == "reentrant"))
            loss.backward()
        assert not draw.unpaired
        assert draw.drawn == draws_of(program)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        for key, parameter in module.named_parameters():
            gradient = leaves[key].grad
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def run(draw: Callable[[Tensor], Tensor]) -> PositionalRandom:
    module = Drawing(draw)
    with torch.random.fork_rng(devices=()), PositionalRandom(SEED) as found:
        module(torch.ones(ROWS, WIDTH)).backward()
    return found


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return x


def own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(WIDTH, generator=torch.Generator().manual_seed(0))


def drops(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3)


def test_other_draws_are_told() -> None:
    rows = run(lambda x: x[torch.multinomial(torch.ones(ROWS), 2)])
    assert list(rows.unpaired) == ["aten.multinomial.default"]
    assert list(run(seeded).unpaired) == [UNSEEN]
    assert list(run(own_generator).unpaired) == ["aten.rand.generator with a generator of its own"]


def test_what_draws_nothing_runs_as_it_is() -> None:
    for same in (lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x, 0.0), torch.sin):
        found = run(same)
        assert not found.unpaired and len(found.drawn) == 1


@pytest.mark.parametrize("n_dims", [3, 4])
def test_results_have_the_strides_of_torch(n_dims: int) -> None:
    """A module may view them."""
    x = torch.randn(*(2, 3, 4, 6)[-n_dims:], dtype=torch.float64)
    for value in (x, x.transpose(-1, -2)):
        for function in (lambda t: F.scaled_dot_product_attention(t, t, t, dropout_p=0.3), drops):
            with PositionalRandom(1):
                found = function(value)
            assert found.stride() == function(value).stride()

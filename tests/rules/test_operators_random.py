"""The hash behind random operators: its numbers are uniform and independent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.operators import DROPOUT, UNIFORM, Stream, seed_tensor, step_seed

# 2^18 numbers: a mean or a correlation of independent numbers has sigma 1 / sqrt(n) = 0.002.
SHAPE = (8, 32, 1024)
FIVE_SIGMA = 5 / 512


def positions(*shape: int) -> list[Tensor]:
    return [torch.arange(n) for n in shape]


def drawn(seed: int = 1, occurrence: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Uniform numbers, scaled to mean 0 and variance 1."""
    u = UNIFORM(seed_tensor(step_seed(seed, 0)), positions(*shape), occurrence, torch.float64)
    return (u - 0.5) * 12**0.5


def kept(p: float, seed: int = 1, shape: tuple[int, ...] = SHAPE) -> Tensor:
    result = DROPOUT(torch.ones(shape), seed_tensor(seed), positions(*shape), p, 0)
    return (result != 0).double()


def test_uniform_numbers() -> None:
    """Mean, variance, and equal counts in every 64th of [0, 1)."""
    u = drawn()
    assert abs(u.mean()) < FIVE_SIGMA and abs(u.var() - 1) < FIVE_SIGMA
    counts = torch.histc(u, 64)
    expected = u.numel() / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert 63 - 5 * 126**0.5 < chi_squared < 63 + 5 * 126**0.5


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_share_of_zeros(p: float) -> None:
    share = 1 - kept(p).mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / 2**18) ** 0.5


def test_no_correlation_along_a_dim() -> None:
    """Though hashed sums of elements one index apart differ by the same number everywhere."""
    u = drawn()
    for dim, step in itertools.product(range(3), (1, 2, 4)):
        n = u.shape[dim] - step
        a, b = u.narrow(dim, 0, n), u.narrow(dim, step, n)
        assert abs((a * b).mean()) < FIVE_SIGMA * (SHAPE[dim] / n) ** 0.5
        assert abs(((a * a - 1) * (b * b - 1)).mean()) < FIVE_SIGMA * (SHAPE[dim] / n) ** 0.5


def test_no_correlation_among_draws() -> None:
    """Between occurrences, steps and base seeds, near and far apart."""
    draws = [drawn(1, occurrence) for occurrence in (0, 1, 2, 64)] + [drawn(2), drawn(2**63)]
    for a, b in itertools.combinations(draws, 2):
        assert abs((a * b).mean()) < FIVE_SIGMA
    seeds = {step_seed(base, step) for base in range(100) for step in range(100)}
    assert len(seeds) == 100 * 100


GOLDEN, WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def mixed(state: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = state & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_bits_are_splitmix64() -> None:
    """In one dim, numbers equal those of the published algorithm in Python's integers."""
    # The first number from this seed, as the reference program prints it.
    assert mixed(1234567 + GOLDEN) == 6457827717110365317
    seed, occurrence, n = 7, 3, 100
    key = mixed(seed + (occurrence + 1) * GOLDEN)
    gamma = mixed(key + GOLDEN) | 1
    wanted = [mixed(key + i * gamma) >> 40 for i in range(n)]
    u = UNIFORM(seed_tensor(seed), positions(n), occurrence, torch.float32)
    assert (u * 2**24).to(torch.int64).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_of_every_dtype_is_below_one(dtype: torch.dtype) -> None:
    u = UNIFORM(seed_tensor(0), positions(1000, 100), 0, dtype)
    assert u.dtype == dtype and (u >= 0).all() and (u < 1).all()
    assert abs(u.double().mean() - 0.5) < 0.01


def test_a_slice_draws_what_the_whole_draws() -> None:
    """A slice along several dims, however many elements are drawn at a time."""
    x = torch.randn(6, 40, 300)
    whole = DROPOUT(x, seed_tensor(5), positions(*x.shape), 0.3, 2)
    at: tuple[Any, ...] = (slice(2, 4), torch.tensor([3, 39, 0]), slice(100, None, 7))
    parts = [vector[index] for vector, index in zip(positions(*x.shape), at, strict=True)]
    assert torch.equal(DROPOUT(x[at], seed_tensor(5), parts, 0.3, 2), whole[at])


def test_a_short_vector_draws_once_for_a_dim() -> None:
    y = DROPOUT(torch.ones(8, 16, 5), seed_tensor(1), positions(8, 16, 1), 0.5, 0)
    assert torch.equal(y, y[..., :1].expand_as(y)) and 0 < (y == 0).double().mean() < 1


def test_gradient_has_the_same_zeros() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    vectors = positions(4, 6)
    assert torch.autograd.gradcheck(lambda x: DROPOUT(x, seed_tensor(1), vectors, 0.4, 0), (x,))
    torch.library.opcheck(DROPOUT, (x, seed_tensor(1), vectors, 0.4, 0))
    torch.library.opcheck(UNIFORM, (seed_tensor(1), vectors, 0, torch.float32))


def test_scalars_and_empty_tensors() -> None:
    assert DROPOUT(torch.tensor(1.0), seed_tensor(1), [], 0.5, 0) in (0, 2)
    assert DROPOUT(torch.ones(0, 4), seed_tensor(1), positions(0, 4), 0.5, 0).shape == (0, 4)
    assert DROPOUT(torch.ones(4, 0), seed_tensor(1), positions(4, 0), 0.5, 0).shape == (4, 0)


def test_stream_of_steps() -> None:
    stream = Stream(11)
    first = stream.seed
    stream.n_steps += 1
    assert stream.seed != first == Stream(11).seed
    assert -(2**63) <= Stream(2**64 - 1).seed < 2**63

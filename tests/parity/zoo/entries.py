"""An entry of the zoo: a small model of one family, and its batches.

Sizes divide over four ranks where a real model's would: hidden 64, 4 heads, 2 key heads,
feed-forward 256, vocabulary 64, sequences of 8, batches of 8 rows, 4 experts. Weights are larger
than activations, as in real models, so it pays to shard them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from tests.helpers.jobs import Batch, Case

HIDDEN, HEADS, KV_HEADS, FFN, VOCABULARY = 64, 4, 2, 256, 64
SEQUENCE, ROWS, EXPERTS, N_LAYERS, N_CLASSES = 8, 8, 4, 2, 4
CHANNELS, IMAGE, PATCH = 3, 16, 4
IGNORED = -100

PLANS = ("auto", "tensor", "zero3")


@dataclass(frozen=True)
class Entry:
    """One family: its microbatches (`why` only one), the `PLANS` that apply, other options."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    microbatches: int = 2
    why: str = ""
    plans: tuple[str, ...] = PLANS
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.microbatches == 1) == bool(self.why), self

    @property
    def case(self) -> Case:
        return Case(self.make, self.batch)


def config(kind: str, **values: Any) -> PreTrainedConfig:
    """A configuration of transformers without dropout, nested configurations included."""
    return without_dropout(AutoConfig.for_model(kind, **values))


def without_dropout(found: PreTrainedConfig) -> PreTrainedConfig:
    """Set every probability of dropping anything (values, attention, layers, paths) to 0."""
    for name, value in vars(found).items():
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(found, name, 0.0)
    return found


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(seed: int, n_ids: int = VOCABULARY) -> Tensor:
    """Tokens other than the special ones 0, 1 and 2."""
    return torch.randint(3, n_ids, (ROWS, SEQUENCE), generator=draw(seed))


def unevenly(labels: Tensor, seed: int) -> Tensor:
    """Ignore all labels of row 0, and in other rows the more, the later the row."""
    chance = torch.arange(len(labels))[:, None] / len(labels)
    out = labels.masked_fill(torch.rand(labels.shape, generator=draw(seed)) < chance, IGNORED)
    out[0] = IGNORED
    return out


def tokens(seed: int) -> Batch:
    """A batch of a language model."""
    found = ids(seed)
    return {"input_ids": found, "labels": unevenly(found, seed)}


def next_tokens(seed: int) -> Batch:
    """Tokens, and the next tokens as labels: for a model that does not shift labels itself."""
    found = ids(seed)
    return {"input_ids": found, "labels": unevenly(found.roll(-1, 1), seed)}


def padded(seed: int) -> Batch:
    """Tokens of rows of unequal length, and their attention mask."""
    lengths = torch.arange(ROWS) % 3 + SEQUENCE - 2
    mask = (torch.arange(SEQUENCE) < lengths[:, None]).long()
    return {"input_ids": ids(seed) * mask, "attention_mask": mask}


def masked(seed: int) -> Batch:
    """A batch of a masked language model."""
    batch = padded(seed)
    labels = ids(seed + 1).masked_fill(batch["attention_mask"] == 0, IGNORED)
    return batch | {"labels": unevenly(labels, seed)}


def classes(seed: int) -> Tensor:
    return torch.randint(0, N_CLASSES, (ROWS,), generator=draw(seed))


def sentences(seed: int) -> Batch:
    """A batch of a classifier of sentences."""
    return padded(seed) | {"labels": classes(seed)}


def pixels(seed: int) -> Tensor:
    return torch.randn(ROWS, CHANNELS, IMAGE, IMAGE, generator=draw(seed))


def images(seed: int) -> Batch:
    """A batch of a classifier of images."""
    return {"pixel_values": pixels(seed), "labels": classes(seed)}


def states(seed: int, *names: str, rows_first: bool = True) -> Batch:
    """Hidden states by name: (rows, sequence, hidden), or with the first two exchanged."""
    shape = (ROWS, SEQUENCE) if rows_first else (SEQUENCE, ROWS)
    generator = draw(seed)
    return {name: torch.randn(*shape, HIDDEN, generator=generator) for name in names}

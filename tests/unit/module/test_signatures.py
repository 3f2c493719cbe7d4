"""Batches unlike the planned one: captured anew, so that each computes or fails as eager would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import AutoparError, BatchError, OptionError
from tests.helpers.jobs import machine

ALONE = machine((1, 1))
pytestmark = pytest.mark.filterwarnings("ignore:captured a batch")


class Tagger(nn.Module):
    """An embedding and a head; a mask and a flag may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(
        self, idx: Tensor, labels: Tensor, mask: Tensor | None = None, flag: str = ""
    ) -> Tensor:
        hidden = self.embed(idx)
        if mask is not None:
            hidden = hidden * mask
        loss = F.cross_entropy(self.head(hidden), labels)
        return loss * 2 if flag == "doubled" else loss


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "idx": torch.randint(0, 10, (8,), generator=generator),
        "labels": torch.randint(0, 4, (8,), generator=generator),
    }


def ready(**planned: Any) -> tuple[autopar.ParallelModule, nn.Module]:
    torch.manual_seed(0)
    model = Tagger().double()
    return autopar.parallelize(model, ALONE, batch() | planned), model


MASK = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]
ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int32 ids": ({}, {"idx": batch()["idx"].int()}),
    "a flag that changes no operator": ({"mask": MASK}, {"mask": MASK, "flag": "other"}),
    "a mask of another dtype": ({"mask": MASK}, {"mask": MASK > 0.5}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_eager_accepts_is_computed(name: str) -> None:
    planned, given = ACCEPTED[name]
    module, model = ready(**planned)
    module.step(**batch() | planned)
    module.zero_grad()
    loss, wanted = module.step(**batch() | given), model(**batch() | given)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=0, atol=1e-12)
    for (_, found), parameter in zip(module.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad, rtol=0, atol=1e-12)


OTHER_GRAPHS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a flag": ({}, {"flag": "doubled"}, r"has \['flag'\] besides"),
    "another flag": (
        {"flag": "doubled"}, {"flag": "other"}, "`flag` is 'other', planned as 'doubled'",
    ),
    "an input more": ({}, {"mask": MASK}, r"has \['mask'\] besides"),
    "an input less": ({"mask": MASK}, {}, r"lacks \['mask'\]; it has \['idx', 'labels'\]"),
    "None": ({"mask": MASK}, {"mask": None}, r"`mask` is None, planned as float64 \(8, 1\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_GRAPHS)
def test_a_plan_is_of_one_graph(name: str) -> None:
    """Training refuses other operators than were planned. Evaluation computes them."""
    planned, given, message = OTHER_GRAPHS[name]
    module, model = ready(**planned)
    with pytest.raises(BatchError, match=rf"{message}[\s\S]*the plan does not fit"):
        module.step(**batch() | given)
    module.eval()
    torch.testing.assert_close(module(**batch() | given), model.eval()(**batch() | given).detach())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float ids": (
        {"idx": batch()["idx"].float()}, r"`idx` is float32 \(8,\), planned as int64 \(8,\)",
    ),
    "float labels": ({"labels": batch()["labels"].float()}, "`labels` is float32"),
    "labels of int32": ({"labels": batch()["labels"].int()}, "expected target dtype to be Long"),
    "no tensor": ({"mask": "text"}, r"has \['mask'\] besides"),
    "a misspelled key": (
        {"label": batch()["labels"]},
        r"has \['label'\] besides; it has \['idx', 'label', 'labels'\][\s\S]*unexpected keyword"
        r"[\s\S]*Tagger\.forward takes \(idx, labels, mask, flag\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str) -> None:
    given, message = REFUSED[name]
    module, model = ready()
    with pytest.raises((TypeError, RuntimeError)):
        model(**batch() | given)
    with pytest.raises((AutoparError, RuntimeError), match=message):
        module.step(**batch() | given)


def test_a_key_that_is_missing() -> None:
    module, _ = ready()
    with pytest.raises(BatchError, match=r"lacks \['labels'\] and has \['label'\] besides"):
        module.step(idx=batch()["idx"], label=batch()["labels"])
    with pytest.raises(BatchError, match=r"1 positional inputs and keyword inputs \['labels'\]"):
        module.step(batch()["idx"], labels=batch()["labels"])


@pytest.mark.filterwarnings("error")  # of a capture
def test_lifted_inputs_are_alike() -> None:
    """With precision="fp64" a float32 batch and a float64 one run the same program."""
    model = nn.Sequential(nn.Linear(4, 2))
    x = torch.randn(4, 4)
    module = autopar.parallelize(
        model, ALONE, (x,), precision="fp64", loss_fn=lambda y, _: y.square().mean()
    )
    assert module.step(x) == module.step(x.double())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_a_step_without_gradients(mode: Callable[[], Any]) -> None:
    module, _ = ready()
    with mode(), pytest.raises(OptionError, match=f"step under torch.{mode.__name__}"):
        module.step(**batch())
    module.step(**batch())


def test_planning_under_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(OptionError, match="could not be trained"):
        autopar.parallelize(Tagger(), ALONE, batch())


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(x if mask is None else x * mask)


def entropy(scores: Tensor, given: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(scores, given["labels"])


def test_a_key_that_nothing_reads() -> None:
    """Keys that only the loss reads are fine. What nothing reads may be misspelled."""
    good: dict[str, Any] = {"x": torch.randn(8, 8), "labels": torch.arange(8) % 4}
    module = autopar.parallelize(Scores(), ALONE, good, loss_fn=entropy)
    module.step(**good)
    with pytest.warns(UserWarning, match=r"has \['masks'\], which neither the loss reads nor"):
        module.step(**good | {"masks": torch.ones(8, 1)})
    with pytest.warns(UserWarning, match=r"has \['masks'\]"):
        autopar.parallelize(Scores(), ALONE, good | {"masks": torch.ones(8)}, loss_fn=entropy)
    with pytest.raises(BatchError, match=r"lacks \['labels'\][\s\S]*KeyError"):
        module.step(x=good["x"])


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, pair: Any) -> Tensor:
        scale = 2.0 if isinstance(pair, dict) else 1.0
        return (self.head(pair["0"] if isinstance(pair, dict) else pair[0]) * scale).square().mean()


def test_structures_with_equal_paths_differ() -> None:
    torch.manual_seed(0)
    model, x = Nested(), torch.randn(8, 8)
    module = autopar.parallelize(model, ALONE, {"pair": [x]})
    for pair in ([x], {"0": x}):
        torch.testing.assert_close(module.step(pair=pair), model(pair=pair).detach())


def test_an_input_named_batch() -> None:
    module, _ = ready()
    with pytest.raises(OptionError, match=r"`batch` is an option of pm\.step"):
        module.step(batch=torch.ones(2))  # type: ignore[arg-type]


class Weighted(nn.Module):
    """Its forward has parameters that are named like options of `pm.step` and `pm(...)`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(
        self, x: Tensor, weight: Tensor | float = 1.0, outputs: Any = None, gather: Any = None
    ) -> Tensor:
        return (self.head(x).square().sum(-1) * weight).mean()


ROWS = torch.linspace(0, 1, 8, dtype=torch.float64)
X = {"x": ROWS[:, None] * torch.ones(8, dtype=torch.float64)}


def weighted(**planned: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Weighted().double()
    return autopar.parallelize(model, ALONE, X | planned), model


def test_an_input_named_like_an_option_is_refused() -> None:
    module, _ = weighted()
    calls: dict[str, Callable[..., Any]] = {"pm.step": module.step, "pm": module.eval()}
    module.train()
    for call, option, value in (
        ("pm.step", "weight", 3.0), ("pm.step", "weight", 1.0), ("pm.step", "weight", ROWS),
        ("pm.step", "outputs", ROWS), ("pm", "gather", ROWS),
    ):  # fmt: skip
        words = f"`{option}` is an option of {call}.* Weighted.forward has a parameter `{option}`"
        with pytest.raises(OptionError, match=words) as caught:
            calls[call](**X, **{option: value})
        assert "the batch as one dict" in str(caught.value)
    for wrong in (ROWS, "a"):
        with pytest.raises(OptionError, match="a number that multiplies"):
            module.step(X, weight=wrong)


def test_a_batch_of_one_dict_may_have_keys_named_like_options() -> None:
    module, model = weighted(weight=ROWS)
    given = X | {"weight": ROWS}
    loss = model(**given)
    with pytest.raises(OptionError, match="is an input of the planned batch"):
        module.step(**X, weight=0.5)
    torch.testing.assert_close(module.step(given, weight=0.5), loss.detach())
    (0.5 * loss).backward()
    torch.testing.assert_close(
        module.full_gradients()["head.weight"], model.get_parameter("head.weight").grad
    )
    torch.testing.assert_close(module.loss(given), loss.detach())
    torch.testing.assert_close(module.eval()(given), loss.detach())


def test_a_dict_that_the_model_takes_stays_an_input() -> None:
    torch.manual_seed(0)
    model = Nested().double()
    module = autopar.parallelize(model, ALONE, {"pair": {"0": X["x"]}})
    loss = model({"0": X["x"]}).detach()
    torch.testing.assert_close(module.step({"0": X["x"]}), loss)
    torch.testing.assert_close(module.step({"pair": {"0": X["x"]}}), loss)

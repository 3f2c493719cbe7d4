"""Weak scaling of transformers by dims: its laws, shapes from configurations, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.hardware import Software, changed, load_profile
from autopar.cost.transformer import (
    Chunk,
    LayerModel,
    Recipe,
    Scaling,
    TransformerShape,
    default_nodes,
    parameters_of,
    shape_of,
    training_dtype,
    weak_scaling,
)
from autopar.errors import NotSupportedError, OptionError
from autopar.report import scaling_svg, scaling_text
from tests.helpers.commands import command, good, refused

SMALL = TransformerShape(
    layers=8, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=2816, seq=2048, vocab=32000,
    is_gated=True,
)  # fmt: skip
H100 = load_profile("h100-sxm")
FREE_LINKS = ",".join(
    f"link.{where}.{what}=0x"
    for where in ("intra_node", "inter_node")
    for what in ("latency_s", "s_per_byte")
)
RECIPES = st.builds(
    Recipe,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    zero=st.sampled_from([0, 1, 3]),
    sp=st.booleans(),
    microbatch_size=st.integers(1, 2),
    global_batch=st.just(2),
)


def scaled(recipe: Recipe, nodes: tuple[int, ...] = (4, 8, 32), **kwargs: Any) -> Scaling:
    return weak_scaling(SMALL, recipe, kwargs.pop("profile", H100), nodes, 8, **kwargs)


@given(RECIPES)
def test_the_batch_grows_with_the_devices(recipe: Recipe) -> None:
    found = scaled(recipe)
    first = found.points[0]
    for point, n_nodes in zip(found.points, (4, 8, 32), strict=True):
        assert point.n_devices == 8 * n_nodes == point.dp * recipe.tp * recipe.pp
        assert point.global_batch * first.dp == first.global_batch * point.dp
        tokens = point.global_batch * SMALL.seq
        assert point.tokens_per_s == pytest.approx(tokens / point.step_time_s)
        share = point.tokens_per_s / first.tokens_per_s * first.n_devices / point.n_devices
        assert point.efficiency == pytest.approx(share)
        assert point.peak_bytes > 0
    assert first.efficiency == 1.0


@given(RECIPES.filter(lambda recipe: recipe.zero == 0))
def test_only_gradient_sync_makes_more_devices_less_efficient(recipe: Recipe) -> None:
    """With free links and steady ranks, efficiency is 1 for every number of devices."""
    efficiencies = [point.efficiency for point in scaled(recipe, (4, 32)).points]
    assert efficiencies == sorted(efficiencies, reverse=True)
    free = changed(
        H100, f"{FREE_LINKS},link.intra_node.in_switch_s_per_byte=0x,link.intra_node.chunk_s=0x"
    )
    for point in scaled(recipe, (4, 32), profile=free, software=Software()).points:
        assert point.efficiency == pytest.approx(1.0, rel=1e-9)


def test_slow_links_between_nodes_lower_efficiency() -> None:
    recipe = Recipe(tp=8)
    slow = changed(H100, "link.inter_node.s_per_byte=10x")
    for here, there in zip(
        scaled(recipe).points[1:], scaled(recipe, profile=slow).points[1:], strict=True
    ):
        assert there.efficiency < here.efficiency


def test_nodes_go_to_sixteen_thousand_devices() -> None:
    assert [8 * n for n in default_nodes(Recipe(tp=8), 8)] == [8 << k for k in range(12)]
    assert default_nodes(Recipe(tp=8, pp=12), 8)[:2] == (12, 24)
    assert default_nodes(Recipe(tp=4, pp=3), 8)[0] == 3
    last = scaled(Recipe(tp=8), (1, 2048)).points[-1]
    assert (last.n_devices, last.dp) == (16384, 2048)


def test_the_dtype_is_one_that_the_device_is_fast_at() -> None:
    assert training_dtype(load_profile("v100-32gb")) == torch.float16
    assert training_dtype(load_profile("a100-80gb")) == torch.bfloat16


@pytest.mark.parametrize(
    ("recipe", "nodes", "said"),
    [
        (Recipe(tp=8, pp=3), (1, 3), "1 nodes of 8 devices are no multiple .* multiples of 3 hold"),
        (Recipe(), (0,), "0 nodes"),
        (Recipe(tp=32), (4,), "tp=32 does not divide the 16 heads"),
        (Recipe(ep=2), (4,), "ep=2 does not divide the 1 experts"),
        (Recipe(pp=16), (2,), "more chunks than the model's 8 layers"),
        (Recipe(tp=8), (2, 3), "a batch of 1 is not a whole number"),
    ],
)
def test_recipes_that_do_not_fit(recipe: Recipe, nodes: tuple[int, ...], said: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){said}"):
        scaled(recipe, nodes, batch=1 if nodes == (2, 3) else None)


DIMS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
WIDE = DIMS | {"num_key_value_heads": 2, "intermediate_size": 112}
CONFIGS = {
    "llama": WIDE,
    "mistral": WIDE | {"head_dim": 32},
    "qwen3": WIDE | {"head_dim": 32, "tie_word_embeddings": False},
    "mixtral": WIDE | {"num_local_experts": 4},
    "gpt2": DIMS | {"n_positions": 32, "n_inner": 192},
}


def n_parameters(shape: TransformerShape) -> float:
    layer, whole = LayerModel(shape, Recipe(), Software()), Chunk(shape.layers, True, True)
    return sum(parameters_of(layer, whole).values())


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_shape_has_the_parameters_of_its_model(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(config, seq=32)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert n_parameters(shape) == pytest.approx(held, rel=2e-3)


def test_a_head_is_tied_where_the_configuration_says_so() -> None:
    apart, tied = (
        shape_of(
            transformers.AutoConfig.for_model("llama", **WIDE, tie_word_embeddings=is_tied), 32
        )
        for is_tied in (False, True)
    )
    assert n_parameters(apart) - n_parameters(tied) == apart.vocab * apart.hidden
    with pytest.raises(NotSupportedError, match="a t5 by its dims alone"):
        shape_of(transformers.AutoConfig.for_model("t5"), seq=32)


def test_the_plot_has_a_line_per_machine_in_both_panels() -> None:
    scalings = [scaled(Recipe(tp=8)), scaled(Recipe(tp=8), profile=changed(H100, FREE_LINKS))]
    drawing = ElementTree.fromstring(scaling_svg("a <title>", scalings))
    lines = drawing.findall("{*}polyline")
    assert len(lines) == 4
    assert all(len(str(line.get("points")).split()) == 3 for line in lines)
    assert len(drawing.findall("{*}circle")) == 12
    words = [element.text for element in drawing.findall("{*}text")]
    assert {"a <title>", "32", "256", "100%", scalings[1].hardware} <= set(words)


def test_a_plot_of_one_point() -> None:
    ElementTree.fromstring(scaling_svg("one", [scaled(Recipe(tp=8), (1,))]))


def test_the_table_says_what_does_not_fit() -> None:
    fits = scaling_text([scaled(Recipe(tp=8))])
    assert "does not fit" not in fits and fits.splitlines()[2].split()[:2] == ["32", "4"]
    small = changed(H100, "device.memory_bytes=1e8")
    assert "does not fit: " in scaling_text([scaled(Recipe(tp=8), profile=small)])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({"model_type": "llama"} | WIDE))
    return str(path)


GIVEN = ("--scale", "--seq", "128", "--hardware", "a100-80gb")


def test_scale_of_a_configuration(config: str, tmp_path: Path) -> None:
    plot = tmp_path / "scaling.svg"
    recipe = ("--tp", "2", "--pp", "3", "--zero", "1", "--microbatch", "2", "--sp")
    what_if = ("--what-if", "link.inter_node.s_per_byte=0.5x")
    words = (*GIVEN, *recipe, *what_if, "--nodes", "3,6", "--svg", str(plot))
    found = good(command("simulate", config, *words, "--json"))
    assert found["recipe"] == found["recipe"] | {"tp": 2, "pp": 3, "zero": 1, "sp": True}
    assert [p["n_devices"] for p in found["scalings"][0]["points"]] == [24, 48]
    assert [s["hardware"] for s in found["scalings"]] == [
        "a100-80gb", "a100-80gb with link.inter_node.s_per_byte=0.5x",
    ]  # fmt: skip
    assert found["written"] == [str(plot)] and plot.read_text().startswith("<svg ")
    text = command("simulate", config, *words).stdout
    assert text.startswith("config.json: tp=2, pp=3, sp, zero=1, microbatch 2, 1f1b, bfloat16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scale", "--hardware", "a100-80gb"), "--seq 4096"),
        (("--scale", "--seq", "128"), "--hardware h100-sxm"),
        ((*GIVEN, "--optimizer", "sgd"), "--optimizer: --scale makes no plan"),
        ((*GIVEN, "--trace", "out.json"), "--trace: --scale without --mesh"),
        ((*GIVEN, "--slow", "0:2"), "--slow: --scale without --mesh"),
        ((*GIVEN, "--nodes", "a"), "'a' is not a list of counts"),
        ((*GIVEN, "--batch", "0"), "sizes are at least 1"),
        ((*GIVEN, "--schedule", "interleaved"), "--interleave 1"),
        ((*GIVEN, "--recompute", "some"), "--recompute some"),
        ((*GIVEN, "--what-if", "x=2x"), "no figure 'x'"),
    ],
)
def test_wrong_use_of_scale(config: str, words: tuple[str, ...], said: str) -> None:
    assert said in refused(command("simulate", config, *words))


def test_only_a_configuration_has_dims_to_scale() -> None:
    words = ("simulate", "tests.unit.cost.test_what_if:tiny", *GIVEN)
    assert "no config.json" in refused(command(*words))

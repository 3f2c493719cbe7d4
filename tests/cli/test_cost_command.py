"""`autopar cost`: formulas, sources and times, as text and as JSON; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost.hardware import even_group, load_profile
from autopar.cost.laws import KINDS, collective_time_s, explain
from tests.helpers.commands import command, good, refused

HARDWARE = ("--hardware", "a100-80gb")


def found(*args: str) -> Any:
    return good(command("cost", *args, "--json"))


def test_text_has_formulas_sources_symbols_and_times() -> None:
    words = ("all_reduce", "--ranks", "16", "--nodes", "2", *HARDWARE)
    lines = command("cost", *words).stdout.splitlines()
    assert lines[0] == "all_reduce of 16 ranks, 8 in each of 2 nodes of a100-80gb"
    assert "g                  ranks in each node; here 8" in lines
    assert [line.split()[2] for line in lines[-2:]] == ["ring", "ring"]
    assert lines[-1].startswith("    1.0 GiB  ring")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 4])
def test_json_has_what_the_model_says(kind: str, nodes: int) -> None:
    data = found(kind, "--ranks", "8", "--nodes", str(nodes), *HARDWARE)
    profile = load_profile("a100-80gb")
    links = profile.link("intra_node"), profile.link("inter_node")
    group = even_group(8, 8 // nodes, *links)
    assert (data["kind"], data["n_ranks"], data["n_nodes"]) == (kind, 8, nodes)
    counted = [row["algorithm"] for row in data["algorithms"] if not row["left_out"]]
    assert counted == [one.algorithm for one in explain(kind, group) if not one.left_out]
    assert [row["time_s"] for row in data["times"]] == [
        collective_time_s(kind, row["size_bytes"], group) for row in data["times"]
    ]
    assert {row["algorithm"] for row in data["times"]} <= set(counted)
    assert data["links"]["across"]["s_per_byte"] == links[1].s_per_byte


def test_one_size_and_its_bus_bandwidth() -> None:
    (row,) = found("all_gather", "--ranks", "4", "--size", "256MiB", *HARDWARE)["times"]
    assert row["size_bytes"] == 256 * 2**20
    expected = 3 / 4 * row["size_bytes"] / row["time_s"]
    assert row["bus_bytes_per_s"] == pytest.approx(expected)


def test_without_hardware_it_is_the_detected_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert found("all_reduce", "--ranks", "2")["hardware"] == "cpu-local"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("all_sum", "--ranks", "2"), "unknown collective 'all_sum'\n  hint: it is one of all_re"),
        (("all_reduce", "--ranks", "9", "--nodes", "4"), "9 ranks on 4 nodes"),
        (("all_reduce", "--ranks", "1"), "at least 2 ranks"),
        (("all_reduce", "--ranks", "2", "--nodes", "0"), "2 ranks on 0 nodes"),
        (("all_reduce", "--ranks", "2", "--size", "big"), "'big' is not a number of bytes"),
        (("all_reduce", "--ranks", "2", "--size", "0B"), "a size of 0 bytes"),
        (("all_reduce", "--ranks", "2", "--hardware", "abacus"), "unknown hardware profile"),
    ],
)
def test_wrong_use_is_refused(args: tuple[str, ...], message: str) -> None:
    assert message in refused(command("cost", *args))

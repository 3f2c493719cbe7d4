"""The command line: exit codes, JSON on a clean stdout, errors on stderr, and help."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autopar
from autopar.cli import doctor, shell
from autopar.cli.options import parse_force, parse_manual, parse_mesh, parse_stages
from autopar.errors import OptionError
from autopar.manual import Manual
from autopar.option_values import parse_bytes
from autopar.runtime.flight import FlightRecord
from tests.cli.factories import CONFIG, SIZES, Run, run
from tests.conftest import Golden
from tests.helpers.commands import good, refused
from tests.helpers.nightly import nightly
from tests.helpers.page import page_facts

__all__ = ["run"]

HELPED = (
    (), ("plan",), ("explain",), ("simulate",), ("compare",), ("cost",), ("validate",), ("doctor",),
)  # fmt: skip


def test_help_is_what_it_was(run: Run, golden: Golden) -> None:
    texts = [run(*words, "--help").stdout for words in HELPED]
    golden("cli_help.txt", "\n".join(texts))


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"{autopar.__version__}\n"
    command = [sys.executable, "-m", "autopar", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"{autopar.__version__}\n"


def test_no_torch_is_imported_for_the_options() -> None:
    """`autopar.cli` alone does not import torch; `import autopar` is left out of the test."""
    code = (
        "import sys, types; package = types.ModuleType('autopar');"
        f"package.__path__ = [{str(Path(shell.__file__).parents[1])!r}];"
        "sys.modules['autopar'] = package; import autopar.cli; print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_report_of_a_saved_plan(run: Run) -> None:
    limited = ("--memory-limit", "3GiB", "--microbatches", "2")
    good(run("plan", "tiny:mlp", "--mesh", "1x2", *limited, "-o", "plan.json", "--json"))
    assert "--model MODEL" in refused(run("report", "plan.json"))
    found = run("report", "plan.json", "--model", "tiny:mlp", "--no-replan")
    assert (found.exit_code, found.stdout) == (shell.GOOD, "plan.html\nplan.dot\n")
    assert Path("plan.dot").read_text().startswith("digraph plan {")
    _, command, *words = shlex.split(page_facts(Path("plan.html").read_text())["command"])
    assert good(run(command, *words, "--json")) and set(limited) <= set(words)
    notes = _machine_notes("plan.html")
    assert notes["twice the memory"] == "not planned again"
    again = run("report", *STAGES, "-o", "page.html", "--json")
    assert good(again)["written"] == ["page.html", "page.dot"]
    notes = _machine_notes("page.html")
    assert notes["twice the memory"] != "not planned again"


def _machine_notes(page: str) -> dict[str, str]:
    return {row["what"]: row["note"] for row in page_facts(Path(page).read_text())["machine"]}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--microbatches 2 --memory-limit 40GiB --forbid tensor", marks=nightly),
        pytest.param(
            "--stages 2 --precision bf16-mixed --reduce-dtype bfloat16 --optimizer sgd",
            marks=nightly,
        ),
        "--force transformer.wte.weight=S(0)@0 --mesh-shape dp=4,tp=1",
        "--manual dp=2,tp=2,recompute=full",
    ],
)
def test_every_command_of_a_page_runs_as_printed(run: Run, flags: str) -> None:
    """With the options of the plan; the first one plans the same again."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64,
              "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 256}  # fmt: skip
    Path("my model.json").write_text(json.dumps(config))
    sizes = ("--batch", "8", "--seq", "32", "--mesh", "1x4", "--hardware", "a100-80gb")
    words = ("my model.json", *sizes, *flags.split())
    good(run("report", *words, "--no-replan", "--json"))
    facts = page_facts(Path("plan.html").read_text())
    rows = facts["choices"] + facts["machine"]
    for row in rows:
        program, *again = shlex.split(row["command"])
        assert program == "autopar" and good(run(*again, "--json"))
    program, *again = shlex.split(facts["command"])
    good(run(*again, "-o", "again.json", "--json"))
    good(run("plan", *words, "-o", "plan.json", "--json"))
    assert Path("again.json").read_text() == Path("plan.json").read_text()


def test_report_that_cannot_be_written(run: Run) -> None:
    words = ("report", "tiny:mlp", "--mesh", "1x2", "--manual", "tp=2", "--no-replan", "-o")
    assert "cannot write" in refused(run(*words, "nowhere/page.html"))
    assert "plan.html" in refused(run(*words, "page.dot"))


def test_plan_prints_json_alone(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    found = good(run("plan", "tiny:mlp", "--mesh", "1x2", "--json", "-o", "plan.json"))
    assert found["mesh"] == [1, 2]
    assert set(found["parameters"]) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert found["predicted"]["step_time_s"] > 0
    (saved,) = json.loads(Path("plan.json").read_text())["stages"]
    assert saved["parameters"] == found["parameters"] == found["stages"][0]["parameters"]
    printed = capfd.readouterr()
    assert "library" in printed.err
    assert "library" not in printed.out


def test_plan_is_short_and_names_what_to_run_next(run: Run) -> None:
    words = ("plan", "tiny:mlp", "--mesh", "1x2", "--memory-limit", "1 GiB")
    result = run(*words, "--output", "plan.json")
    assert result.exit_code == shell.GOOD, result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 14
    labels = {line[:9].strip(): line[10:] for line in lines[4:] if line[:9].strip()}
    assert labels["plan"].startswith("Mlp on (") and labels["step"].count("per device") == 1
    assert labels["memory"].endswith("free; the limit is 1.0 GiB")
    commands = [shlex.split(line[10:]) for line in lines[-2:]]
    assert [command[0] for command in commands] == ["autopar", "autopar"]
    assert "\nconsidered\n" in run(*commands[0][1:]).stdout  # they run as printed
    assert run(*commands[1][1:]).stdout == "plan.html\nplan.dot\n"


def test_plan_explains(run: Run) -> None:
    result = run("plan", "tiny:mlp", "--mesh", "1x2", "--forbid", "zero3,tensor", "-v")
    assert result.exit_code == shell.GOOD, result.output
    assert "\n\nMlp on (" in result.stdout
    assert "ZeRO-3" not in result.stdout


def test_options_reach_the_planner(run: Run) -> None:
    manual = ("--manual", "dp=1,tp=2", "--microbatches", "2", "--memory-limit", "1GiB")
    found = good(run("plan", "tiny:mlp", "--mesh", "1x2", *manual, "--json"))
    (stage,) = found["stages"]
    assert stage["axes"] == {"dp": 1, "tp": 2}
    assert stage["ranks"] == [0, 1] and stage["modules"] == ["up", "down"]
    assert found["microbatches"] == 2
    assert found["chosen"] == "manual recipe"
    pin = ("--force", "up.weight=S(1)@tp")
    found = good(run("plan", "tiny:mlp", "--mesh", "1x2", *pin, "--json"))
    assert found["parameters"]["up.weight"] == "I S(1)"


def test_saved_plans_are_explained_and_emitted(run: Run) -> None:
    made = good(run("plan", "tiny:mlp", "--mesh", "1x2", "--json", "-o", "plan.json"))
    alone = run("explain", "plan.json")
    assert alone.exit_code == shell.GOOD
    assert "up.weight" in alone.stdout
    assert made["parameters"]["up.weight"] in run("explain", "plan.json", "up.weight").stdout
    bound = good(run("explain", "plan.json", "--model", "tiny:mlp", "--json"))
    assert bound["predicted"] == made["predicted"]
    again = good(run("code", "plan.json", "--model", "tiny:mlp", "--json"))
    assert again["files"] == good(run("code", "tiny:mlp", "--mesh", "1x2", "--json"))["files"]
    assert "--model MODEL" in refused(run("code", "plan.json"))
    assert "--solver" in refused(run("explain", "plan.json", "--solver", "ilp"))
    assert "no parameter" in refused(run("explain", "plan.json", "nothing"))


STAGES = ("tiny:mlp", "--mesh", "1x2", "--stages", "up@1;down@1x1", "--microbatches", "2")


def test_stages_are_explained_and_saved(run: Run) -> None:
    found = good(run("plan", *STAGES, "--schedule", "gpipe", "-o", "plan.json", "--json"))
    assert (found["schedule"], found["microbatches"]) == ("gpipe", 2)
    assert [s["ranks"] for s in found["stages"]] == [[0], [1]]
    assert [set(s["parameters"]) for s in found["stages"]] == [
        {"up.weight", "up.bias"}, {"down.weight", "down.bias"},
    ]  # fmt: skip
    assert list(found["stages"][0]["sent"]) == list(found["stages"][1]["received"])
    alone = run("explain", "plan.json").stdout
    assert alone.startswith("Mlp on 2 stages (") and "stage 1, from down/" in alone
    assert run("explain", "plan.json", "down.bias").stdout.endswith("  on stage 1\n")
    bound = run("explain", "plan.json", "--model", "tiny:mlp").stdout
    assert "2 microbatches, gpipe: " in bound and "0 -> 1" in bound


def test_a_file_per_stage(run: Run) -> None:
    found = run("code", *STAGES, "-o", "out")
    assert found.stdout == f"{Path('out/stage_0.py')}\n{Path('out/stage_1.py')}\n"
    printed = run("code", *STAGES).stdout
    assert all(Path(f"out/stage_{k}.py").read_text() in printed for k in range(2))


def test_verify_compares_with_one_process(run: Run) -> None:
    manual = ("--manual", "dp=1,tp=2", "--precision", "fp64")
    found = good(run("verify", "tiny:mlp", "--mesh", "1x2", *manual, "--json"))
    assert found["equal"] is True
    assert max(found["errors"].values()) <= found["tolerance"] == 1e-10
    assert found["not_compared"] is None
    assert max(found["capture_errors"].values()) <= found["capture_tolerance"] == 1e-6
    assert set(found["errors"]) == set(found["capture_errors"])
    assert set(found["errors"]) == {"loss", "up.weight", "up.bias", "down.weight", "down.bias"}


@pytest.mark.parametrize(
    ("flags", "n_bytes"),
    [((), 8), (("--master-weights",), 16), (("--precision", "bf16-mixed"), 16)],
)
def test_state_of_a_published_configuration_in_bfloat16(
    run: Run, flags: tuple[str, ...], n_bytes: int
) -> None:
    Path("config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
    result = run("plan", "config.json", "--mesh", "1x2", *SIZES, "--manual", "dp=2", *flags, "-v")
    assert result.exit_code == shell.GOOD, result.output
    (line,) = (text for text in result.stdout.splitlines() if text.startswith("state:"))
    assert line.startswith(f"state: {n_bytes} bytes a parameter:")
    assert ('precision="bf16-mixed" keeps float32' in line) == (n_bytes == 8)


def test_verify_of_a_configuration_takes_random_weights(run: Run) -> None:
    precision = ("--precision", "fp64", "--manual", "dp=2")
    result = run("verify", "config.json", "--mesh", "2", *SIZES, *precision)
    assert result.exit_code == shell.GOOD, result.output
    sharding, capture, does, *_, plan = result.stdout.splitlines()
    assert sharding.startswith("sharding: equal, worst error")
    assert capture.startswith("capture: equal, worst error")
    assert does == "Data parallel over 2 devices, no recompute."
    assert plan == "GPT2LMHeadModel on (dp=2 x tp=1), 1 microbatch: manual recipe"


def test_verify_fails_where_ranks_differ(run: Run, registry: None) -> None:
    """A rule of the user's says that rows are apart, and the operator has one norm per column."""
    autopar.register_rule("aten::renorm", "b i -> b i")
    manual = ("--manual", "dp=2", "--precision", "fp64")
    result = run("verify", "tiny:columns", "--mesh", "1x2", *manual, "--json")
    assert result.exit_code == shell.FAILED_CHECK
    assert json.loads(result.stdout)["equal"] is False


@nightly
def test_doctor_reaches_every_rank(run: Run) -> None:
    checks = {check["name"]: check for check in good(run("doctor", "--json"))["checks"]}
    assert checks["all_reduce over 2 processes"]["status"] == "ok"
    assert "HiGHS" in checks["solvers"]["detail"]


def test_doctor_fails_on_a_problem(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_all_reduce", lambda: doctor.Check("sum", "problem", "wrong"))
    result = run("doctor")
    assert result.exit_code == shell.FAILED_CHECK
    assert "problem  sum" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("ops", "tiny:broken"), "ZeroDivisionError"),
        (("ops", "tiny:alone"), "not (model, example_inputs)"),
        (("ops", "tiny:nothing"), "no function 'nothing'"),
        (("ops", "nowhere:mlp"), "no module 'nowhere'"),
        (("ops", "tiny"), "names no model"),
        (("ops", "tiny:mlp", "--batch", "4"), "for a config.json"),
        (("ops", "config.json"), "--batch"),
        (("ops", "tiny:mlp", "--fallback", "hope"), "fallback is one of"),
        (("ops", "tiny:mlp", "--mesh", "two"), "'two' is not a mesh"),
        (("ops", "lost.json", *SIZES), "cannot read"),
        (("plan", "tiny:mlp"), "a mesh is needed"),
        (("plan", "tiny:mlp", "--mesh", "two"), "not a mesh"),
        (("plan", "tiny:mlp", "--mesh", "2x2x2x2"), "one to three axes"),
        (("plan", "tiny:mlp", "--mesh", "2", "--hardware", "abacus"), "abacus"),
        (("plan", "tiny:mlp", "--mesh", "2", "--stages", "2", "--forbid", "pipeline"), "stages=2"),
        (("plan", "tiny:mlp", "--mesh", "2", "--stages", "up@1;nothing@1"), "nothing"),
        (("plan", "tiny:mlp", "--mesh", "2", "--stages", "up@1;down@x"), "not a mesh"),
        (("plan", "tiny:mlp", "--mesh", "2", "--schedule", "pipedream"), "pipedream"),
        (("plan", "tiny:mlp", "--mesh", "2", "--forbid", "all"), "forbid"),
        (
            ("plan", "tiny:rare", "--mesh", "2"),
            "aten.fake_quantize_per_tensor_affine_cachemask.default",
        ),
        (("plan", "tiny:mlp", "--no-such-flag"), "--no-such-flag"),
        # Told before the factory, which fails, is called.
        (("plan", "tiny:broken", "--mesh", "2", "--hardware", "h100sx"), "did you mean 'h100-sxm'"),
        (("plan", "tiny:mlp", "--mesh", "2", "--memory-limit", "40"), "write 40GiB"),
        (("plan", "tiny:mlp", "--mesh", "2", "--forbid", "tp"), "did you mean 'tensor'"),
        (
            ("plan", "tiny:mlp", "--mesh", "2", "--manual", "dp=2 tp=2, sp"),
            "write --manual dp=2,tp=2,sp",
        ),
        (("plan", "some/model-8b", "--mesh", "2", *SIZES), "download its config.json"),
        (("plan", "../", "--mesh", "2", *SIZES), "names of a model hub are not"),
        (("explain", "tiny:mlp", "--model", "tiny:mlp", "--mesh", "2"), "is a model"),
        (("calibrate", "--ranks", "two"), "'two' is not a list of counts"),
        (("calibrate", "--ranks", "2,1"), "a group of 1 has no"),
        (("diagnose", "nowhere"), "has no notes of ranks"),
        ((), "Usage"),
    ],
)
def test_wrong_use_is_told_on_stderr(run: Run, args: tuple[str, ...], message: str) -> None:
    assert message in refused(run(*args))
    assert {path.name for path in Path().iterdir()} <= {"tiny.py", "config.json", "__pycache__"}


def test_an_unknown_architecture_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "vit.json").write_text(json.dumps(CONFIG | {"architectures": ["GPT2Model"]}))
    assert "GPT2Model" in refused(run("ops", "vit.json", *SIZES))


def test_bytes_meshes_recipes_and_pins() -> None:
    sizes = {"40GiB": 40 * 2**30, "1.5 kb": 1500, "7B": 7, "2TB": 2 * 10**12, "1024B": 1024}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    assert parse_mesh("2x8") == (2, 8)
    assert parse_mesh("4") == (4,)
    assert parse_manual("dp=2, tp=4,sp,zero=1") == Manual(dp=2, tp=4, sp=True, zero=1)
    assert parse_manual("recompute=none,sp=false") == Manual()
    stages = [(("a", "b.0"), (1, 2)), (("c",), (2, 1))]
    assert parse_stages("a, b.0@2; c@2x1") == stages
    assert (parse_stages("2"), parse_stages("auto")) == (2, "auto")
    assert parse_force(["a.b=S(0)@1", "a.b=I@0"]) == {"a.b": ["S(0)@1", "I@0"]}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, "40 apples"), (parse_bytes, "GiB"), (parse_bytes, "40"),
        (parse_manual, "dd=2"), (parse_manual, "dp=two"), (parse_manual, "dp"),
        (parse_mesh, "2x"), (parse_mesh, ""),
        (parse_stages, "a@"), (lambda text: parse_force([text]), "h.0.weight"),
    ],
)  # fmt: skip
def test_malformed_texts_are_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(OptionError):
        parse(text)


def test_json_has_no_infinities() -> None:
    text = shell.to_json({"a": [float("inf"), {"b": float("nan")}], "c": (1.5,)})
    assert json.loads(text) == {"a": [None, {"b": None}], "c": [1.5]}


def test_diagnose_names_the_rank_that_is_behind(run: Run, tmp_path: Path) -> None:
    for name in ("notes", "other"):
        (tmp_path / name).mkdir()
    records = [FlightRecord(tmp_path / "notes" / f"rank-{rank}.ring") for rank in range(2)]
    for record in records:
        record.begin_step(0)
    records[0].call("all_reduce over dp of 64 B (grad_sync)")
    found = good(run("diagnose", "notes", "--ranks", "3", "--json"))
    assert found["ranks"]["0"][-1]["call"] == "all_reduce over dp of 64 B (grad_sync)"
    text = run("diagnose", "notes", "--ranks", "3").stdout.splitlines()
    assert text[0] == "rank 1 is behind the others" and "rank 2: has noted nothing" in text[3]
    FlightRecord(tmp_path / "other" / "rank-2.ring").begin_step(0)
    joined = run("diagnose", "notes", "other").stdout.splitlines()
    assert joined[0] == "ranks 1, 2 are behind the others"
    assert "left notes in notes and in a folder before" in refused(
        run("diagnose", "notes", "notes")
    )


@pytest.mark.parametrize(
    ("words", "type_", "said"),
    [
        (("ops", "tiny"), "OptionError", "names no model"),
        (("plan", "lost.json", *SIZES, "--mesh", "2"), "PlanError", "cannot read"),
        (("plan", "tiny:mlp", "--nosuch"), "UsageError", "--nosuch"),
        (("plan",), "UsageError", "MODEL"),
    ],
)
def test_a_refusal_is_json_if_asked(
    run: Run, words: tuple[str, ...], type_: str, said: str
) -> None:
    found = run(*words, "--json")
    assert found.exit_code == 2
    error = json.loads(found.stdout)["error"]
    assert error["type"] == type_ and said in error["message"]
    assert "error:" not in found.stderr
    if type_ == "OptionError":
        assert error["hint"] and "hint" not in error["message"]
    plain = run(*words)
    assert plain.exit_code == 2 and not plain.stdout and said in plain.stderr


def test_a_saved_plan_folds_equal_layers(run: Run) -> None:
    sizes = (*SIZES, "--mesh", "1x2", "--manual", "dp=2")
    Path("two.json").write_text(json.dumps(CONFIG | {"n_layer": 2}))
    good(run("plan", "two.json", *sizes, "-o", "plan.json", "--json"))
    names = json.loads(Path("plan.json").read_text())["stages"][0]["parameters"]
    text = run("explain", "plan.json").stdout
    n_layers = len({name.split(".")[2] for name in names if ".h." in name})
    assert n_layers > 1 and f"transformer.h.*.mlp.c_fc.weight ({n_layers})" in text
    assert "transformer.h.0" not in text
    found = run("explain", "plan.json", "mlp.c_fc.weight").stdout
    assert found.startswith(f"transformer.h.*.mlp.c_fc.weight ({n_layers})  ")

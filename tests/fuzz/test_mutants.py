"""Every mutant is refused by an `AutoparError` or is right; none takes long or touches a file."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli import WRONG_USE, app
from autopar.errors import AutoparError
from autopar.plans import load_plan
from tests.fuzz import plans, profiles
from tests.fuzz.watch import Tally
from tests.helpers.nightly import nightly

COMMANDS = ("explain", "report", "simulate", "code", "compare")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plans.write_profile(tmp_path_factory.mktemp("outside"))


@pytest.mark.parametrize("n_mutants", [300, pytest.param(10_000, marks=nightly)])
@pytest.mark.timeout(7200)
def test_mutants_of_plans(n_mutants: int, profile: Path, tmp_path: Path) -> None:
    tally, every = Tally("plans"), plans.originals(profile)
    file = tmp_path / "plan.json"
    for number, original in zip(range(n_mutants), itertools.cycle(every), strict=False):
        file.write_bytes(plans.mutant(original, number, profile))
        name = f"{original.name} {number}"
        tally.take(name, functools.partial(plans.used, original, file, profile))
    tally.check()


@pytest.mark.parametrize("n_mutants", [60, pytest.param(500, marks=nightly)])
@pytest.mark.timeout(3600)
def test_mutants_of_profiles(n_mutants: int, profile: Path, tmp_path: Path) -> None:
    tally, original = Tally("profiles"), plans.originals(profile)[0]
    file = tmp_path / "profile.toml"
    for number in range(n_mutants):
        file.write_bytes(profiles.mutant(number))
        tally.take(f"profile {number}", functools.partial(profiles.used, original, file))
    tally.check()


@pytest.mark.parametrize("n_files", [10, pytest.param(200, marks=nightly)])
@pytest.mark.timeout(1800)
def test_commands_refuse_damaged_files(n_files: int, profile: Path, tmp_path: Path) -> None:
    """Every command on the first mutants that cannot be read."""
    original, file, n_damaged = plans.originals(profile)[1], tmp_path / "plan.json", 0
    for number in itertools.count():
        if n_damaged == n_files:
            return
        file.write_bytes(plans.mutant(original, number, profile))
        try:
            load_plan(file)
        except AutoparError:
            n_damaged += 1
        else:
            continue
        for command in COMMANDS:
            files = [str(file)] * (2 if command == "compare" else 1)
            words = [command, *files, "--model", f"{plans.__name__}:no_such_model"]
            result = CliRunner().invoke(app, words, prog_name="autopar")
            assert isinstance(result.exception, SystemExit), (number, command, result.exception)
            assert (result.exit_code, result.stdout) == (WRONG_USE, ""), (number, command)
            assert result.stderr.startswith("error: "), (number, command)

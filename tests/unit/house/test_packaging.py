"""Packaging: symlinked subpackages, the wheel, pinned versions, and file sizes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
LINKED = ("cost", "passes", "runtime")
MAX_LINES = 500


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that no build folder lands in the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("autopar", "src", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    project = pyproject()["project"]
    for name in ("pyproject.toml", *project["license-files"], project.get("readme")):
        if name:
            shutil.copy(ROOT / name, source)
    return source


def built(source: Path, kind: str) -> zipfile.ZipFile:
    """The wheel that `build_{kind}` makes of a copy."""
    build = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, f"dist_{kind}"], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / f"dist_{kind}").glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel_names(source: Path) -> list[str]:
    """File names in a wheel."""
    with built(source, "wheel") as archive:
        return archive.namelist()


def test_an_editable_install_is_a_folder_on_the_path(source: Path) -> None:
    """Editors and type checkers read paths of `.pth` files, and run no finder."""
    with built(source, "editable") as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        folder = Path(archive.read(path).decode().strip())
    assert folder == source / "src"
    found = {entry.name for entry in folder.iterdir() if entry.suffix != ".egg-info"}
    assert found == {"autopar"} and (folder / "autopar" / "py.typed").is_file()


@pytest.mark.parametrize("name", LINKED)
def test_subpackages_are_relative_links(name: str) -> None:
    assert os.readlink(ROOT / "autopar" / name) == f"../{name}"


def test_the_wheel_claims_no_generic_name(wheel_names: list[str]) -> None:
    top_level = {name.split("/")[0] for name in wheel_names}
    assert top_level == {"autopar", f"autopar-{pyproject()['project']['version']}.dist-info"}


def test_the_wheel_holds_every_source_profile_and_run(wheel_names: list[str]) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in (ROOT / "autopar", *(ROOT / "autopar" / name for name in LINKED))
        for suffix in ("*.py", "*.toml", "*.json", "py.typed", "web/bundle/*")
        for path in package.rglob(suffix)
        if "web" not in path.parts or "bundle" in path.parts  # of the page, its bundle is shipped
    }
    assert expected <= set(wheel_names), sorted(expected - set(wheel_names))


def names_of(requirements: Iterable[str]) -> set[str]:
    """Distribution names, normalised as in PEP 503."""
    found = (re.match(r"[A-Za-z0-9._-]+", line) for line in requirements)
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match}


def test_every_direct_dependency_is_pinned() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"].values()
    direct = names_of([*project["dependencies"], *(line for extra in extras for line in extra)])
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert direct <= names_of(pins), sorted(direct - names_of(pins))


def test_files_stay_short() -> None:
    folders = ("autopar", *LINKED, "tests", "examples", "docs")
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(ROOT / "tests" / "golden")
    }
    assert lengths, "no source found"
    assert {name: n for name, n in lengths.items() if n >= MAX_LINES} == {}

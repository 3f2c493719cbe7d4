"""The doors of the house, as a contract of import-linter: nobody imports past the door of a room.

A *room* is a package with files; its `__init__` is the door, and exports what others need. A *wing*
is a package of rooms (`autopar`, `autopar.passes`): its own files are open to all.

    allowed     from autopar.passes.intra import Chooser            (the door)
    allowed     from autopar.mesh import Mesh                       (a file of a wing)
    refused     from autopar.passes.intra.chooser import Chooser    (unless inside intra)

A test imports the files of the room it tests: a folder on its path has the name of that room, or of
the wing. `tests/intra` may import `autopar.passes.intra.chooser`, `tests/unit/cost` any file of
`autopar.cost`. All else it takes from doors. `exceptions` are imports of helpers that patch a file.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class DoorsContract(Contract):
    """`wings` are the packages that are no rooms; every other package is one."""

    type_name = "doors"

    wings = fields.SetField(subfield=fields.StringField())
    exceptions = fields.SetField(subfield=fields.StringField(), required=False, default=set())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        wings: set[str] = self.wings  # type: ignore[assignment]
        unknown = sorted(wings - graph.modules)
        assert not unknown, f"no such packages: {unknown}"
        past = {
            f"{importer} -> {imported}"
            for imported in graph.modules
            if (room := imported.rpartition(".")[0]) in graph.modules - wings
            if imported.startswith("autopar.") and imported.rpartition(".")[2] not in _exports(room)
            for importer in graph.find_modules_that_directly_import(imported)
            if not _is_inside(importer, room)
        }
        exceptions: set[str] = self.exceptions  # type: ignore[assignment]
        stale = sorted(exceptions - past)
        assert not stale, f"no such imports past a door: {stale}"
        past -= exceptions
        return ContractCheck(kept=not past, metadata={"past": sorted(past)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for past in check.metadata["past"]:
            room = past.rpartition(".")[0].rpartition(" ")[2]
            output.print_error(f"{past}: import it from {room}")


@cache
def _exports(room: str) -> set[str]:
    """The names in `__all__` of the door: an export may be called as its file."""
    text = Path(*room.split("."), "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def _is_inside(importer: str, room: str) -> bool:
    """Whether `importer` may import files of `room`: it is in the room, or a test of it."""
    if importer == room or importer.startswith(f"{room}."):
        return True
    folders = set(importer.split(".")[1:-1])
    return importer.startswith("tests.") and bool(folders & set(room.split(".")[1:]))

"""The doors of the house, as a contract of import-linter: nobody imports past the door of a room.

A *room* is a package with files; its `__init__` is the door, and exports what others need. A *wing*
is a package of rooms (`autopar`, `autopar.passes`): its own files are open to all.

    allowed     from autopar.passes.intra import Chooser            (the door)
    allowed     from autopar.mesh import Mesh                       (a file of a wing)
    refused     from autopar.passes.intra.chooser import Chooser    (unless inside intra)
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class DoorsContract(Contract):
    """`wings` are the packages that are no rooms; every other package is one."""

    type_name = "doors"

    wings = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        wings: set[str] = self.wings  # type: ignore[assignment]
        unknown = sorted(wings - graph.modules)
        assert not unknown, f"no such packages: {unknown}"
        past = [
            (importer, imported)
            for imported in sorted(graph.modules)
            if (room := imported.rpartition(".")[0]) and room in graph.modules - wings
            for importer in sorted(graph.find_modules_that_directly_import(imported))
            if importer != room and not importer.startswith(f"{room}.")
        ]
        return ContractCheck(kept=not past, metadata={"past": past})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["past"]:
            room = imported.rpartition(".")[0]
            output.print_error(f"{importer} imports {imported}: import it from {room}")

"""How Sphinx builds the site: `make docs-site`, into build/docs.

Pages are Markdown (MyST). The reference is made of docstrings, which `docs/docstrings.py` turns
into reStructuredText. A warning fails the build, and so does a link to a page, section or object
that does not exist.

Links into the documentation of Python and torch need their inventories, which are downloaded. So
they are made only with AUTOPAR_DOCS_INTERSPHINX=1 in the environment.
"""

import os
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar
from docs.docstrings import for_autodoc
from docs.generated import commands_help, profiles_table
from docs.links import with_downloads

project = "autopar"
author = "the authors of autopar"
version = release = autopar.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"autopar {version}"
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
highlight_language = "text"

# Docstrings put code between single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

if os.environ.get("AUTOPAR_DOCS_INTERSPHINX") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }

# Classes that are passed on and never made by users; their docstrings are read in the source.
PASSED_ON = (
    "Bound Checkpointed ExampleInputs Figures Lengths Loaded Loader LocalBatches Localise "
    "LossScale MeshLike ModuleState Note OpCall OpRule Optimizers Options Pin PlanData PlanOptions "
    "PlanningStats Precision Recompute ShellModel StageOption Stateful States Stream"
).split()
# Names in annotations: those of other projects, and these.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|os|pathlib|typing|collections|typer)\..*"),
    (
        "py:.*",
        r"(Any|Callable|Collection|Iterable|Iterator|Mapping|Path|PurePath|Sequence|Tensor|Optimizer"
        r"|DataLoader|Dataset|DeviceMesh|Module|Parameter|Literal|Self|Unpack|optional|TracebackType)",
    ),
    ("py:.*", rf"(autopar\..*\.)?({'|'.join(PASSED_ON)})"),
]


class CommandsHelp(SphinxDirective):
    """`{autopar-help}`: every command with its help."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(commands_help(), allow_section_headings=True)


class ProfilesTable(SphinxDirective):
    """`{autopar-profiles}`: the shipped hardware profiles."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(profiles_table())


def read_source(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = with_downloads(source[0], app.env.doc2path(name, base=False))


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", for_autodoc)
    app.add_directive("autopar-help", CommandsHelp)
    app.add_directive("autopar-profiles", ProfilesTable)

"""The documentation site: ``make docs`` builds it into ``build/docs``.

The source directory is the repository's root, so that links between pages, and from pages to files, are the same here
and on GitHub.
"""

import contextlib
import inspect
import io
import os
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.addnodes import pending_xref

from lightning_smddp import __version__, cli

project = html_title = "lightning-smddp"
release = __version__
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "examples/README.md", "benchmarks/**.md", "tests/**README.md"]
exclude_patterns = [".*", "build", "dist", "*.egg-info", "lightning_logs", "checkpoints", "demo_output", "gpu*.md"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 4  # links to headings, as GitHub makes them
# Records of benchmarks and the tests' own pages are reached by links alone.
suppress_warnings = ["toc.not_included"]
highlight_language = "text"

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
napoleon_numpy_docstring = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]  # sends the site's root on to `root_doc`
html_copy_source = False
html_show_copyright = False


class CommandHelp(Directive):
    """What ``lightning-smddp COMMAND --help`` prints, of each command."""

    required_arguments = 1
    optional_arguments = 9  # more commands

    def run(self):
        """Return a block of text for each command."""
        os.environ["COLUMNS"] = "100"  # of argparse
        return [self.block(command) for command in self.arguments]

    @staticmethod
    def block(command):
        """Return the help of one command."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        return nodes.literal_block(text.getvalue(), text.getvalue(), language="text")


def take_inherited(app, what, name, obj, options, lines):
    """Strategies inherit their docstrings from the class that has their code; autodoc looks at their own alone."""
    if what == "class" and not any(lines):
        lines[:] = inspect.getdoc(obj).splitlines()


def leave_folders(app, doctree):
    """GitHub has a page for each folder, the site has none: such a link is its text."""
    here = Path(doctree["source"]).parent
    for link in list(doctree.findall(pending_xref)):
        if link["reftype"] == "myst" and (here / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def keep_records_out_of_search(app, env):
    """They name everything that the guides explain."""
    for page in env.found_docs:
        if page.startswith("benchmarks/results"):
            env.metadata[page]["nosearch"] = True


def setup(app):
    """Take what is inherited before napoleon, whose priority is 500, reads it."""
    app.add_directive("command-help", CommandHelp)
    app.connect("doctree-read", leave_folders)
    app.connect("env-updated", keep_records_out_of_search)
    app.connect("autodoc-process-docstring", take_inherited, priority=400)

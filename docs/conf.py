"""The site: these pages, README as its first page, and the API from the docstrings."""

import os
import re
from pathlib import Path
from typing import Any

import bahdanau_fast

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Files of the repository's root that pages of the site include.
INCLUDED = {f"{name.upper()}.md": f"{name}.md" for name in ("contributing", "changelog")}
INCLUDED["README.md"] = "index.md"

project = "bahdanau_fast"
version = release = bahdanau_fast.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3  # links to headings as a code host names them
nb_execution_mode = "off"  # a test executes the notebook
html_theme = "furo"
html_title = f"bahdanau_fast {release}"
html_show_copyright = html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
html_static_path = html_css_files = ["site.css"]
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring, napoleon_use_ivar = False, True


def relink(text: str, folder: Path) -> str:
    """Markdown of a folder with its relative links as seen from docs/.

    A file outside docs/ can be downloaded from the site; a folder or page is named, without a link.
    """

    def link(match: re.Match[str]) -> str:
        words, (path, mark, anchor) = match[1] or "", match[2].partition("#")
        if not path or "://" in path:
            return match[0]
        target = (folder / path).resolve()
        name = INCLUDED.get(os.path.relpath(target, ROOT)) or os.path.relpath(target, DOCS)
        if name.startswith("..") and (target.is_dir() or target.suffix == ".md"):
            return words[1:]
        return f"{words}]({name}{mark}{anchor})"

    # The words are left out where they are an image, which is a link itself.
    return re.sub(r"(\[[^][]*)?\]\(([^)\s]+)\)", link, text)


def setup(app: Any) -> None:
    """Rewrite the links of every page, and of what it includes."""
    app.connect("source-read", lambda _app, _page, text: text.append(relink(text.pop(), DOCS)))
    app.connect(
        "include-read",
        lambda _app, path, _page, text: text.append(relink(text.pop(), (DOCS / path).parent)),
    )

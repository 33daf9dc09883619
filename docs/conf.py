"""Sphinx builds the site from the pages of the repository as they are: `make docs`, without network."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "CPSR"
author = "CPSR"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.site.api",
    "docs.site.pages",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"]
exclude_patterns = [".venv", "build", "benchmarks", "cpsr", "node_modules", "runs", "tests"]

html_theme = "furo"
html_title = "CPSR"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]  # leads to the page of that name in docs
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

default_role = "code"  # docstrings say `name`
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # names of defaults, not what they hold
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

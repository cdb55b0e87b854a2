"""The site that `make docs` builds from docs/*.md and the Markdown files beside docs/.

The source folder is the repository's root, so that a link between two files is the same on this
site, in a checkout and on a page that hosts the code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch_blocked  # noqa: E402

project = "torch_blocked"
release = torch_blocked.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["docs/*.md", "benchmarks/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "dist", "csrc", "test", "src", "release", "examples"]

myst_heading_anchors = 4  # as a page that hosts the code names them
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# Every reference must lead somewhere on this site; types of Python and torch have theirs elsewhere.
nitpicky = True
nitpick_ignore_regex = [("py:class", r"(torch|collections|typing|pathlib|os|nn)\b.*|.*\._\w+")]

templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme = "furo"
html_title = f"torch_blocked {release}"
html_copy_source = False
html_show_copyright = False
html_additional_pages = {"index": "to_docs.html"}

"""Sphinx's settings. The site is built, without network, by

sphinx-build -W --keep-going -b html docs build/docs
"""

import sys
from pathlib import Path

import hstree

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_extensions"))

project = "hstree"
copyright = "the authors of hstree"
version = release = hstree.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "links",
    "mathml",
    "reference",
]
exclude_patterns = ["requirements.txt", "_extensions", "_templates"]
templates_path = ["_templates"]
nitpicky = True
# There is no network at build time to look up other libraries. Records that functions of the
# laboratory only return are not exported.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|numpy|np|npt|nn|abc|collections|multiprocessing|os|pathlib|typing|matplotlib"
        r"|safetensors|tokenizers|transformers)(\..*)?",
    ),
    ("py:class", "Tensor|Module|Size|ParamsT|_Module|Activation"),
    ("py:class", r"(hstree\.heads\.state\.)?HasWeight"),
    ("py:class", r"Unpack|(Head|Flat|Draw|Latent|Tree)Options"),
    ("py:(class|exc)", r"hstree\.lab\.\w+\.\w+|StudyError|StudyInterrupted"),
    (
        "py:class",
        r"Function|Context|hstree\.lm\.train\.(_Value|Step)",
    ),
]

# Where the files outside of docs/ can be read. Empty: the site carries them as downloads.
repository_url = ""

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

autosummary_ignore_module_all = False
autodoc_member_order = "groupwise"
autodoc_inherit_docstrings = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"hstree {release}"
html_static_path = ["_static"]
html_show_sphinx = False
html_css_files = ["hstree.css"]
html_math_renderer = "mathml"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

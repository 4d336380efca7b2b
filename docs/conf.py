"""How the documentation is built: `make docs`."""

from importlib.metadata import version as installed_version

project = "Lakewarden"
author = "The Lakewarden authors"
release = version = installed_version("lakewarden")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"Lakewarden {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# Only our own names are checked: looking up those of other projects would need the network.
nitpick_ignore_regex = [(r"py:.*", r"(?!lakewarden\b).*")]
# Values inside plans and receipts that callers need not know.
nitpick_ignore = [
    ("py:class", "lakewarden.errors.Exit"),
    ("py:class", "lakewarden.maintenance.optimize.Request"),
    ("py:class", "lakewarden.maintenance.places.Place"),
    ("py:class", "lakewarden.maintenance.rewriting.Job"),
    ("py:class", "lakewarden.packing.Coverage"),
    ("py:class", "lakewarden.pipeline.frames.Root"),
    ("py:class", "lakewarden.pipeline.listing.Unit"),
    ("py:class", "lakewarden.storage.location.Location"),
    ("py:class", "lakewarden.warehouse.transaction.Result"),
]

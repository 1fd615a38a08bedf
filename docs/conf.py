"""Configuration of Sphinx. `build.py` writes the sources and runs it."""

import keras_posttrain
from docs import links

project = "keras_posttrain"
author = "The keras_posttrain authors"
copyright = f"2026, {author}"
version = release = keras_posttrain.__version__

extensions = ["myst_nb", "sphinx.ext.viewcode", "sphinx_copybutton"]
# The guides have been run; see `guides.py`.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = True

add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 60
toc_object_entries = False
# Public names are exported from other modules than their own.
viewcode_follow_imported_members = True

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
# The search reads other pages for it, which files may not do.
html_show_search_summary = False
exclude_patterns = ["readme.md"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_selector = "div.highlight:not(.output *) > pre"


def setup(app):
    app.add_transform(links.LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

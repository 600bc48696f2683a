"""conf.py: how Sphinx makes the documentation site from README.md and the pages below docs/ (scripts/site.sh).

The pages stay plain Markdown that reads well in the repository: what orders them stands here, in NAVIGATION, and is
added to their text while it is read. Sphinx names a page that is in no list, and site.sh fails.
"""

from __future__ import annotations

NAVIGATION = {  # page: its lists of further pages, each with a caption
    "README": {
        "Start": ["docs/install", "docs/examples", "docs/from-flash-attn", "docs/compat", "docs/moving",
                  "docs/transformers", "docs/jax", "docs/context-parallel",
                  "docs/training-over-gpus"],
        "Use": ["docs/api", "docs/python", "docs/api-python", "docs/api-c", "docs/bindings", "docs/masks",
                "docs/dynamic-masks", "docs/serving", "docs/engines", "docs/which-kernel", "docs/selection",
                "docs/backward-tiles", "docs/hopper-tiles", "docs/tuning", "docs/troubleshooting"],
        "Kernels": ["docs/cpu", "docs/cuda", "docs/hopper", "docs/blackwell", "docs/mma", "docs/gemm", "docs/softmax"],
        "Evidence": ["docs/measured", "docs/measured-cpu", "docs/measured-companions", "docs/benchmarks",
                     "docs/verified", "bench/results/README", "docs/lab/README", "docs/emulator"],
        "Project": ["docs/architecture", "docs/adding-a-kernel", "docs/glossary", "CHANGELOG", "CONTRIBUTING",
                    "SECURITY"],
    },
    "docs/examples": {"": ["examples/minilm/README"]},
    "docs/lab/README": {"": ["docs/lab/*"]},
    "docs/architecture": {"": ["docs/decisions/*"]},
}

project = "flash-dmattn"
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**.md", "bench/results/README.md", "examples/minilm/README.md"]
exclude_patterns = [".*", "build*", "dist", "include", "python", "scripts", "src", "tests"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
smartquotes = False  # an option's two hyphens stay two
highlight_language = "none"  # of blocks that name no language

html_theme = "furo"
html_title = "flash-dmattn"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def add_navigation(_app: object, page: str, source: list[str]) -> None:
    for caption, pages in NAVIGATION.get(page, {}).items():
        options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
        entries = [f"/{name}" for name in pages]
        source[0] += "\n\n" + "\n".join(["```{toctree}", *options, "", *entries, "```", ""])


def setup(app: object) -> None:
    app.connect("source-read", add_navigation)

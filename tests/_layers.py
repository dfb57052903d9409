# SPDX-License-Identifier: Apache-2.0
"""The layers of each package, lowest first. `python tests/_layers.py` draws them into docs/architecture.md.

A layer is a folder or a single module. A module may import from its own layer and from the layers below it, also inside
a function and under ``TYPE_CHECKING``: an import that is deferred to hide a cycle is still a cycle to a reader.
"""

from __future__ import annotations

import ast
from pathlib import Path


ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"

LAYERS = {
    name: tuple(layers.split())
    for name, layers in {
        "magi_opschema": """
            errors _text _torch_compat _environment _model _codegen _handles _lowering _call _autograd _ops aten
        """,
        "magi_opschema.aten": "errors _types _torch_compat _stubs _generate _dispatch _runtime _commands",
        "magi_tritonwrap": "errors _torch_compat _identity _kernel _launch _cache_key _find _see_through testing",
        "magi_passes": "errors _torch_compat _graph _identity _framework _rewrites _choose",
        "magi_backend": """
            errors _torch_compat _settings _register _repairs _verify records _records
            _passes _profile _progress _regions _split _hot _report _warm _compose _ahead testing _backend
            _entry_point _magi_compile _doctor __main__
        """,
    }.items()
}
"""The package's own ``__init__`` is above all of them and is not listed."""


def folder_of(name: str) -> Path:
    """Where the sources of the package *name* are, for example of ``magi_opschema.aten``."""
    package = name.split(".", maxsplit=1)[0]
    return (ROOT / "packages" / package.replace("_", "-") / "src").joinpath(*name.split("."))


def drawing(name: str) -> str:
    """The layers of the package *name*, highest first, with the first sentence that each says of itself."""
    width = max(map(len, LAYERS[name]))
    return "\n".join(f"{layer:{width}}  {_sentence(folder_of(name) / layer)}" for layer in reversed(LAYERS[name]))


def _sentence(layer: Path) -> str:
    candidates = (layer / "__init__.py", layer / "__init__.pyi", layer.with_suffix(".py"))
    said = ast.get_docstring(ast.parse(next(path for path in candidates if path.is_file()).read_text())) or ""
    return said.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].partition(": ")[0].rstrip(".")


def drawn(page: str) -> str:
    """*page* with the drawing of each package in its place, under a comment that names it."""
    for name in LAYERS:
        mark, end = f"<!-- not run: the layers of {name}, drawn by tests/_layers.py -->\n```text\n", "```\n"
        before, found, rest = page.partition(mark)
        assert found, f"the page has no place for {name}"
        page = f"{before}{mark}{drawing(name)}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))

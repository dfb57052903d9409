# SPDX-License-Identifier: Apache-2.0
"""Print the uuids of shipped passes, once for each of many edits of the packages in a folder.

Run as `python _uuid_runs.py FOLDER` with the edits as JSON on stdin, `[{"file": ..., "text": ..., "passes": []}]`; an
edit without a file is none. torch is imported once; each edit is read by a forked process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path


def uuids(wanted: list[str]) -> dict[str, str]:
    """The uuids of passes made without arguments, for classes given as `module:name`."""
    pairs = [one.split(":") for one in wanted]
    return {name: getattr(importlib.import_module(module), name)().uuid() for module, name in pairs}


def write(file: Path, text: str) -> None:
    """Put *text* into *file*, and take away what Python made of the text before: it looks at seconds and sizes only."""
    file.write_text(text)
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def main() -> None:
    """Answer each edit with a line of JSON."""
    import pydantic  # noqa: F401
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch._inductor.compile_fx
    import torch._inductor.custom_graph_pass  # noqa: F401

    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    for edit in json.load(sys.stdin):
        file = folder / edit["file"] if edit["file"] else None
        before = file.read_text() if file else ""
        if file:
            write(file, edit["text"])
        child = os.fork()
        if child == 0:
            try:
                sys.stdout.write(json.dumps(uuids(edit["passes"])) + "\n")
                sys.stdout.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        if file:
            write(file, before)


if __name__ == "__main__":
    main()

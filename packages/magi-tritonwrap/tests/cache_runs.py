# SPDX-License-Identifier: Apache-2.0
"""Ask for the cache key of one op in a row of processes, with an edit before each.

Run as `python cache_runs.py (key|compile) FOLDER`: `key` prints what torch puts into the key of a graph with the op,
`compile` compiles that graph and prints what AOTAutograd's cache answered. Both want
the steps as JSON on stdin, `[{"name": ..., "files": {path: text}}, ...]`.
torch is imported once; every step runs in a forked process of its own, which imports the edited files afresh.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters


def key_once(folder: Path) -> dict[str, Any]:
    """Import the package in *folder*, and tell what torch asks of its op for a cache key."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails, BypassAOTAutogradCache

    sys.path.insert(0, str(folder))
    from cached_package import op_module  # type: ignore[import-not-found]
    from magi_tritonwrap import see_through_report

    graph = torch.fx.symbolic_trace(lambda x: op_module.op._opoverload(x) + 1)
    details = AOTAutogradCacheDetails.__new__(AOTAutogradCacheDetails)
    try:
        key = details.get_triton_source_codes_from_gm(graph)
    except BypassAOTAutogradCache as bypass:
        key = [f"bypass: {bypass}"]
    return {"key": key, "cache": see_through_report(op_module.op).cache}


def compile_once(folder: Path) -> dict[str, Any]:
    """Import the package in *folder*, compile its op with Inductor on a CPU, and tell what the cache did."""
    sys.path.insert(0, str(folder))
    from cached_package import op_module
    from magi_tritonwrap import see_through_report

    x = torch.arange(8.0)
    result = torch.compile(lambda value: op_module.op(value) + 1, fullgraph=True)(x)
    seen = counters["aot_autograd"]
    return {
        "hit": seen["autograd_cache_hit"],
        "miss": seen["autograd_cache_miss"],
        "bypass": seen["autograd_cache_bypass"],
        "right": bool(torch.equal(result, op_module.eager(x) + 1)),
        "cache": see_through_report(op_module.op).cache,
    }


def main() -> None:
    run = {"key": key_once, "compile": compile_once}[sys.argv[1]]
    folder = Path(sys.argv[2])

    for step in json.load(sys.stdin):
        for path, text in step["files"].items():
            (folder / "cached_package" / path).write_text(text)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                answer = {"name": step["name"], **run(folder)}
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()
            except Exception:  # noqa: BLE001 (what it is stands in stderr, and the answer is missing)
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()

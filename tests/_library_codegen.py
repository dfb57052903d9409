# SPDX-License-Identifier: Apache-2.0
"""The code that Inductor writes for the programs of benchmarks/libraries.py, without a GPU.

`python tests/_library_codegen.py NAME ...` prints a line of JSON for each program and arm: the kernels that its code
launches, and whether it calls the op instead. The libraries must be importable.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import libraries
from _library_case import ARMS, LibraryCase, program_named
from _library_scan import pretended_gpu as gpu_for_imports
from _pretended_gpu import pretended_gpu
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import JITFunction
from triton.runtime.autotuner import Autotuner


def code_of(name: str, arm: str, size: str) -> str:
    """What Inductor writes for a program under an arm."""
    with contextlib.ExitStack() as stack:
        for context in (
            gpu_for_imports(is_available=False),
            pretended_gpu(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            stack.enter_context(context)
        # It would make constants on the GPU.
        stack.enter_context(torch._inductor.config.patch(joint_graph_constant_folding=False))
        stack.enter_context(torch.no_grad())
        # The opaque arm learns its fakes from a run of the body; weights would be drawn on the GPU.
        with (
            mock.patch.object(JITFunction, "run"),
            mock.patch.object(Autotuner, "run"),
            mock.patch("torch.nn.init.kaiming_uniform_"),
        ):
            case = LibraryCase(name, ARMS[arm], (size,), "cuda", torch.bfloat16)
        try:
            case.call(*case.inputs[size])
        except Exception as error:
            if "Generated" in str(error):
                return str(error)
            raise
    raise AssertionError("nothing was compiled")


def found_in(code: str) -> dict[str, Any]:
    """The library's kernels that *code* launches, by the names of their functions, and whether it calls an op."""
    kernels = [name for name in re.findall(r"^ +(\w+)\.run\(", code, re.MULTILINE) if not name.startswith("triton_")]
    return {"kernels": kernels, "calls_op": "ops.library_" in code}


def main(*names: str) -> None:
    for name in names or libraries.PROGRAMS:
        with gpu_for_imports():
            program_named(name)
        for arm in ("seen_through", "opaque"):
            torch.compiler.reset()
            try:
                found = found_in(code_of(name, arm, "small"))
            except Exception as error:  # noqa: BLE001 - each is tried, and what it fails with is its result
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {str(error).strip()[:800]}"}
            sys.stdout.write(json.dumps({"program": name, "arm": arm, **found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

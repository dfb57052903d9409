# SPDX-License-Identifier: Apache-2.0
"""Search every launching function of an installed library, with the kernels that `libraries/` lists for it.

`python tests/_library_scan.py fla-core` prints what was found as JSON. A process reads one library: importing some of
them changes torch. Kernels count as found by their name; a library that asks for its GPU is shown one that only has
properties.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from _pretended_gpu import H200
from _stand_ins import import_only_kernels_of
from magi_tritonwrap import find_kernels, see_through_report, triton_op
from magi_tritonwrap.testing import stub_driver


# The distribution, and its top-level package.
LIBRARIES = {
    "liger-kernel": "liger_kernel",
    "fla-core": "fla",
    "flag_gems": "flag_gems",
    "unsloth": "unsloth",
    "torchao": "torchao",
    "xformers": "xformers",
}
# Modules of another distribution that fla imports beside its own, and what it takes of them.
ELSEWHERE: dict[str, tuple[str, ...]] = {"fla.layers": (), "fla.layers.utils": ("pad_input", "unpad_input")}


def kernels_of(name: str) -> dict[str, set[str]]:
    """The functions of a library that launch kernels, as `module:name`, with the names of the kernels."""
    lines = (Path(__file__).parent / "libraries" / f"{name}.txt").read_text().splitlines()
    return {function: set(kernels) for function, *kernels in map(str.split, lines)}


def needs(*names: str) -> None:
    """Skip the test that calls it where one of the libraries *names* is not installed."""
    missing = [name for name in names if importlib.util.find_spec(LIBRARIES[name]) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; nox -s libraries installs it")


def scan(name: str) -> dict[str, Any]:
    """What `find_kernels` finds of what the library *name* launches: for each function, the kernels that it misses."""
    expected = kernels_of(name)
    for elsewhere, taken in ELSEWHERE.items():
        stand_in = sys.modules[elsewhere] = ModuleType(elsewhere)
        vars(stand_in).update(dict.fromkeys(taken, lambda *_args: None))
    import_only_kernels_of(LIBRARIES[name])
    with pretended_gpu():
        for module in sorted({function.partition(":")[0] for function in expected}):
            importlib.import_module(module)
    missing, opaque, seconds = {}, {}, []
    for number, (function, kernels) in enumerate(expected.items()):
        module, _, path = function.partition(":")
        body: Any = functools.reduce(getattr, path.split("."), sys.modules[module])
        began = time.process_time()
        found = find_kernels(body).kernels
        seconds.append(time.process_time() - began)
        missing[function] = sorted(kernels - {kernel.name.rpartition(".")[2] for kernel in found})
        with stub_driver():
            op = triton_op(f"library_scan::op_{number}", body, mutates_args=(), schema="() -> ()")
        if reason := see_through_report(op).reason:
            opaque[function] = reason
    times = {"slowest": max(seconds), "seconds": sum(seconds)}
    return {"version": metadata.version(name), "missing": missing, "opaque": opaque, **times}


@contextmanager
def pretended_gpu(*, is_available: bool = True, for_triton: bool = True) -> Iterator[None]:
    """Let torch and Triton tell of a GPU that there is none of: enough for the import of a library.

    With *is_available* off `torch.compile` works meanwhile, and code that asks for properties gets them;
    with *for_triton* off Triton hears of none, as its interpreter wants it.
    """
    names: dict[str, Any] = {
        "device": lambda device: nullcontext(),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: H200.name,
        "get_device_capability": lambda device=None: (H200.major, H200.minor),
        "get_device_properties": lambda device=None: H200,
    }
    if is_available:
        names["is_available"] = lambda: True
    with stub_driver() if for_triton else nullcontext(), mock.patch.multiple(torch.cuda, **names):
        yield


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(scan(sys.argv[1]), indent=1) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""Compare `find_kernels` with a scan of our own, on every launching function of an installed library.

`python tests/_library_scan.py fla-core` prints what it found as JSON. A process reads one library: importing some of
them changes torch. Kernels count as found by their name; a library that asks for its GPU is shown one that only has
properties.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from _gpu_properties import H200
from _launch_scanner import Place, Scan
from magi_tritonwrap import find_kernels
from magi_tritonwrap.testing import stub_driver


def _absent(*_args: Any) -> None:
    """Stands for a function of another distribution."""


@dataclass(frozen=True)
class Library:
    """What is scanned of a library.

    Attributes:
        package: its top-level package.
        under: modules whose functions count.
        without: names of packages that are left out: code for other devices and other compilers, and patches of models.
        environment: what its import reads.
        elsewhere: modules of other distributions that its import needs, and what it takes of them.
    """

    package: str
    under: tuple[str, ...]
    without: frozenset[str]
    environment: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def stand_ins(self) -> dict[str, ModuleType]:
        """What stands for the modules of other distributions."""
        made = {name: ModuleType(name) for name in self.elsewhere}
        for name, taken in self.elsewhere.items():
            vars(made[name]).update(dict.fromkeys(taken, _absent))
        return made


_OTHER_VENDORS = (
    *("_aipu", "_amd", "_arm", "_ascend", "_cambricon", "_enflame", "_hygon", "_iluvatar", "_kunlunxin", "_metax"),
    *("_mthreads", "_sunrise", "_tsingmicro"),
)
LIBRARIES = {
    "liger-kernel": Library(
        "liger_kernel",
        ("liger_kernel.ops", "liger_kernel.megatron"),
        frozenset({"backends", "cutedsl", "cute", "cutile", "transformers", "monkey_patch"}),
    ),
    "fla-core": Library(
        "fla",
        ("fla.ops", "fla.modules"),
        frozenset({"backends"}),
        elsewhere={"fla.layers": (), "fla.layers.utils": ("pad_input", "unpad_input")},
    ),
    "flag_gems": Library(
        "flag_gems", ("flag_gems",), frozenset({*_OTHER_VENDORS, "patches"}), {"GEMS_VENDOR": "nvidia"}
    ),
}


@dataclass(frozen=True)
class ScannedFunction:
    """One function: the kernels that `find_kernels` did not name, and whether it said that something is left."""

    name: str
    kernels: int
    missing: list[str]
    is_silent: bool
    ran_out_of_time: bool
    seconds: float


def folder_of(package: str) -> Path | None:
    """Where a package is installed; None where it is not. Nothing is imported."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]).parent if places else None


def scan(name: str) -> dict[str, Any]:
    """What `find_kernels` finds of what the library *name* launches."""
    library = LIBRARIES[name]
    folder = folder_of(library.package)
    assert folder is not None, f"{name} is not installed"
    launching = {
        place: kernels
        for place, kernels in Scan(folder, library.package, library.without).launching().items()
        if place.module.startswith(library.under)
    }
    sys.modules.update(library.stand_ins())
    with pretended_gpu(), mock.patch.dict(os.environ, library.environment):
        broken = {module: why for module in sorted({place.module for place in launching}) if (why := _failure(module))}
    found = [
        _scanned(place, function, kernels)
        for place, kernels in launching.items()
        if place.module not in broken and (function := _object(place)) is not None
    ]
    return {
        "version": metadata.version(name),
        "functions": [asdict(one) for one in found],
        "broken": broken,
        "seconds": round(sum(one.seconds for one in found), 1),
    }


def _failure(module: str) -> str:
    """Why a module cannot be imported here; empty where it can."""
    try:
        importlib.import_module(module)
    except (ImportError, AssertionError) as error:
        return f"{type(error).__name__}: {error}".partition(" (/")[0]
    return ""


def _object(place: Place) -> Any:
    found: Any = sys.modules[place.module]
    for part in place.name.split("."):
        found = getattr(found, part, None)
    return found


def _scanned(place: Place, function: Any, kernels: frozenset[Place]) -> ScannedFunction:
    began = time.process_time()
    report = find_kernels(function)
    seconds = time.process_time() - began
    expected = {kernel.name.rpartition(".")[2] for kernel in kernels}
    missing = expected - {kernel.name.rpartition(".")[2] for kernel in report.kernels}
    ran_out = any("the search took more than" in launch.reason for launch in report.unresolved)
    return ScannedFunction(str(place), len(expected), sorted(missing), not report.may_launch, ran_out, seconds)


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

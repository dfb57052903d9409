# SPDX-License-Identifier: Apache-2.0
"""Packages compiled ahead of time, loaded in a process that has neither these packages nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from _python import python
from torch import Tensor


LOADING = """
import sys

# As if none of these were installed: `import` fails, and `find_spec`, with which torch looks for Triton, returns None.
for name in ("triton", "magi_opschema", "magi_tritonwrap", "magi_passes", "magi_backend"):
    sys.modules[name] = None
import torch
import torch._inductor.codecache  # torch 2.10 does not import it itself
package, values = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(package)
for x, expected in torch.load(values):
    torch.testing.assert_close(loaded(x), expected)
assert not [name for name, module in sys.modules.items() if name.startswith("magi_") and module is not None]
print("equal")
"""


def check_elsewhere(package: str, values: Sequence[tuple[Tensor, Tensor]], folder: Path) -> str:
    """Fail unless *package* gives the second of each pair for the first, in such a process; what it prints.

    Where torch's own packages crash a process, the test is skipped: on one machine torch 2.11.0+cu130 ended with a
    segmentation fault in `std::regex`, from `parse_device_str` of AOTInductor, for any model.
    """
    try:
        return _load(package, values, folder)
    except AssertionError as error:
        if "Segmentation fault" not in str(error) or _loads_torchs_own(values[0][0], folder):
            raise
        pytest.skip("a package of torch's own operators crashes the process that loads it")


def _load(package: str, values: Sequence[tuple[Tensor, Tensor]], folder: Path) -> str:
    torch.save(list(values), folder / "values.pt")
    return python("-X", "faulthandler", "-W", "ignore", "-c", LOADING, package, folder / "values.pt")


class _Exp(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def _loads_torchs_own(x: Tensor, folder: Path) -> bool:
    """Whether a process survives to load a package of one operator of torch."""
    program = torch.export.export(_Exp(), (x,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "torchs_own.pt2"))
    try:
        _load(package, [(x, x.exp())], folder)
    except AssertionError as error:
        return "Segmentation fault" not in str(error)
    return True

# SPDX-License-Identifier: Apache-2.0
"""Packages compiled ahead of time, loaded in a process that has neither these packages nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    """Fail unless *package* gives the second of each pair for the first, in such a process; what it prints."""
    torch.save(list(values), folder / "values.pt")
    return python("-X", "faulthandler", "-W", "ignore", "-c", LOADING, package, folder / "values.pt")

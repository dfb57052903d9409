# SPDX-License-Identifier: Apache-2.0
"""Types that the generated stubs name."""

from __future__ import annotations

import torch


Scalar = int | float | complex | bool | torch.SymInt | torch.SymFloat | torch.SymBool
"""A number of the schema type `Scalar`."""

Device = torch.device | str | int
"""A value that torch accepts as a device."""

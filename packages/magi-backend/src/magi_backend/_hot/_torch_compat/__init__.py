# SPDX-License-Identifier: Apache-2.0
"""The private torch names behind hot sizes: one function per quirk, for torch 2.10 to 2.15 unless it says otherwise.

graphs.py     where inputs of a captured graph come from, its symbols, copies of it
moments.py    what compiles, what observes calls, what is configured
fakes.py      captured fake tensors as data, and new ones made from it
"""

from __future__ import annotations

from .fakes import CaptureContext, FakeMaker, FakeWorld, describe, fakes_of_capture, is_description
from .graphs import (
    as_int,
    boxed,
    broken_guard,
    expression,
    free_symbols,
    is_left_open,
    is_parameter,
    is_ragged,
    is_size_of_input,
    number_symbols,
)
from .moments import (
    Region,
    autocast_devices,
    checkpoint_region,
    compile_lock,
    config_values,
    configured,
    dispatch_keys_kept,
    is_compiling,
    is_dispatch_observed,
    no_function_modes,
    top_saved_tensor_hooks,
)


__all__ = [
    "CaptureContext",
    "FakeMaker",
    "FakeWorld",
    "Region",
    "as_int",
    "autocast_devices",
    "boxed",
    "broken_guard",
    "checkpoint_region",
    "compile_lock",
    "config_values",
    "configured",
    "describe",
    "dispatch_keys_kept",
    "expression",
    "fakes_of_capture",
    "free_symbols",
    "is_compiling",
    "is_description",
    "is_dispatch_observed",
    "is_left_open",
    "is_parameter",
    "is_ragged",
    "is_size_of_input",
    "no_function_modes",
    "number_symbols",
    "top_saved_tensor_hooks",
]

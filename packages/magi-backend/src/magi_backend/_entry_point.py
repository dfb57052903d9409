# SPDX-License-Identifier: Apache-2.0
"""What torch loads for the name ``magi`` (``torch_dynamo_backends`` in pyproject.toml), and nothing else imports."""

from __future__ import annotations

from ._backend import magi
from ._repairs._defect import repair_capture
from ._torch_compat.compiling import let_threads_register


__all__ = ["magi"]

let_threads_register(magi)
repair_capture()

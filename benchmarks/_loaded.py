# SPDX-License-Identifier: Apache-2.0
"""Importing this loads what every compilation needs; processes that are forked from one that did need not."""

from __future__ import annotations

import magi_passes
import torch._inductor.compile_fx
import triton.compiler
from magi_backend import CompileConfig, magi


__all__ = ["CompileConfig", "magi", "magi_passes", "torch", "triton"]

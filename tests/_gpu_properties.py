# SPDX-License-Identifier: Apache-2.0
"""What a GPU that is not there says of itself."""

from __future__ import annotations

import types


H200 = types.SimpleNamespace(
    major=9,
    minor=0,
    name="no GPU",
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=1 << 36,
    L2_cache_size=50 << 20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)

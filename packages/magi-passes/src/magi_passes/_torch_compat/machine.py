# SPDX-License-Identifier: Apache-2.0
"""Folders and devices of this machine, by names that processes agree on. All releases."""

from __future__ import annotations

import os
import threading

import torch


def inductor_cache_dir() -> str:
    """The directory that Inductor's caches live in."""
    from torch._inductor.runtime import cache_dir_utils

    return str(cache_dir_utils.cache_dir())


def shared_folder() -> str:
    """A folder that all processes of the user on this machine share, independent of their cache directories."""
    from torch._inductor.runtime import cache_dir_utils

    return cache_dir_utils.default_cache_dir()


def unique_suffix() -> str:
    """A file name suffix that no other process or thread uses."""
    return f"{os.getpid()}-{threading.get_ident()}.tmp"


def device_name(device: torch.device) -> str:
    """A name that is the same for devices of equal speed."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_identity(device: torch.device) -> str:
    """A name of this one device, the same in every process, however ``CUDA_VISIBLE_DEVICES`` numbers it."""
    if device.type == "cuda":
        return f"cuda-{torch.cuda.get_device_properties(device).uuid}"
    return device.type

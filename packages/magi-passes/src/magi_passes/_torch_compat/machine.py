# SPDX-License-Identifier: Apache-2.0
"""This machine: the release of torch, folders and devices."""

from __future__ import annotations

import os
import re
import threading

import torch


def torch_version() -> str:
    """The running torch release with its local version, such as ``2.13.0+cpu``."""
    return str(torch.__version__)


# 2.13.1, 2.13.0a0+git0fc8, 2.13.0.dev20260101+cu130, 2.13.1.post1, 2.13.0-vendor1
_VERSION = re.compile(
    r"v?(\d+)\.(\d+)(?:\.(\d+))?"
    r"(?:[-_.]?(?:a|b|rc)\d*)?(?:[-_.]?post(\d*))?(?:[-_.]?dev\d*)?(?:[+-][\w.-]+)?"
)


def numbers_of(version: str) -> tuple[int, int, int, int]:
    """Major, minor, patch and post-release number of *version*, for comparisons: ``2.13.1.post2`` is (2, 13, 1, 2).

    A build before a release counts as the release, ``2.11.0a0+git`` as (2, 11, 0, 0), because it has the same code.

    Raises:
        ValueError: *version* is not a torch release.
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        msg = f"{version!r} is not a torch release; write it as '2.11' or '2.13.1'"
        raise ValueError(msg)
    major, minor, patch, post = (int(part or 0) for part in match.groups())
    return major, minor, patch, post


def release(version: str) -> tuple[int, int]:
    """Major and minor number of *version*: ``2.11.0a0+git`` gives ``(2, 11)``.

    Raises:
        ValueError: *version* is not a torch release.
    """
    return numbers_of(version)[:2]


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

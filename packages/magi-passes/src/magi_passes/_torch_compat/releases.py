# SPDX-License-Identifier: Apache-2.0
"""Releases of torch as numbers. All releases."""

from __future__ import annotations

import re

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

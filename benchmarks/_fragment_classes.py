# SPDX-License-Identifier: Apache-2.0
"""Importing this loads the classes of all fragments; processes that are forked from one that did need not."""

from __future__ import annotations

from _fragment_calls import class_of
from _fragments import FRAGMENTS


CLASSES = {class_of(fragment) for fragment in FRAGMENTS.values()}

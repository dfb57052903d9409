# SPDX-License-Identifier: Apache-2.0
from ._stubs.linalg import *  # noqa: F403

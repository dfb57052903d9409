# SPDX-License-Identifier: Apache-2.0
from ._stubs.special import *  # noqa: F403

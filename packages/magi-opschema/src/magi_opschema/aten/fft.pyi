# SPDX-License-Identifier: Apache-2.0
from ._stubs.fft import *  # noqa: F403

# SPDX-License-Identifier: Apache-2.0
"""The test harness of the ATen surface: inputs, layouts, checks, and the processes that run them."""

# SPDX-License-Identifier: Apache-2.0
"""A kernel as its author decorated it, and what was found out about an operator's kernels. Nothing here runs anything.

kernels.py   the decorators of a kernel, taken apart; which of them a compiled graph can reproduce
launchers.py a library's own objects around a kernel, and the kernel in them
options.py   launch options that a graph can carry
report.py    what users are told: kernels found, launches unresolved, how an operator is compiled
bodies.py    which Python body an operator has
"""

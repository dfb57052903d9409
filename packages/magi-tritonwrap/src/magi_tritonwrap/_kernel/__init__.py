# SPDX-License-Identifier: Apache-2.0
"""A kernel as its author decorated it, and what was found out about an operator's kernels. Nothing here runs anything.

kernels.py   a kernel, its decorators and a library's own objects around it; what of that a graph can reproduce
report.py    what users are told: kernels found, launches unresolved, how an operator is compiled
bodies.py    which Python body an operator has, and which calls run it
"""

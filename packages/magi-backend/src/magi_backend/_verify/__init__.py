# SPDX-License-Identifier: Apache-2.0
"""Compiled code compared with eager code.

compare.py   values taken apart by place, how far apart two results are, and how far is too far
run.py       one run with its gradients on copies of its inputs, and two runs compared
blame.py     the operator that differs, found in a graph that is cut into parts
check.py     `magi.check`: the first call of a compiled piece against eager, forward and backward
"""

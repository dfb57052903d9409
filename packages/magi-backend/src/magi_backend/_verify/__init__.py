# SPDX-License-Identifier: Apache-2.0
"""Compiled code compared with eager code.

trees.py      values taken apart by place, also inside records, and built again
copies.py     copies of inputs that are equal to the originals for a compiler
random.py     the same random numbers for several runs
compare.py    how far apart two results are, and how far is too far
run.py        one run with its gradients, and two runs compared
uninitialised.py  elements that depend on memory that nobody has written
names.py      the names that a user has for the inputs of a graph
parts.py      a graph cut into parts that compute from eager values
blame.py      the operator that differs
check.py      `magi.check`: the first call of a compiled piece against eager, forward and backward
"""

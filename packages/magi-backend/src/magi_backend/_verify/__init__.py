# SPDX-License-Identifier: Apache-2.0
"""Compiled code beside eager code.

copies.py     copies of inputs that a compiler cannot tell from the originals
random.py     the same random numbers for several runs
compare.py    how far apart two results are, and how far is too far
check.py      `magi.check`: the first call of a compiled piece against eager, forward and backward
blame.py      the first operator that differs
"""

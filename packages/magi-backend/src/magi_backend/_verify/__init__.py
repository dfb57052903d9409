# SPDX-License-Identifier: Apache-2.0
"""Compiled code compared with eager code.

compare.py   values taken apart by place, one run with its gradients on copies of its inputs, and two runs compared
blame.py     `magi.check`: the first call of a compiled piece against eager, and the operator that differs
"""

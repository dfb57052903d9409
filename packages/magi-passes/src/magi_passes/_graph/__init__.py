# SPDX-License-Identifier: Apache-2.0
"""Functions that read and write graphs, independent of any pass.

nodes.py    is a graph dynamic, does it convolve, is it sound; convolutions read, and nodes written
work.py     the arithmetic of nodes, and how much of it convolutions are
strides.py  how tensors lie in memory, and the strides that a rewrite must keep
"""

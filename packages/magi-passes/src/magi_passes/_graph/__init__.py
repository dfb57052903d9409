# SPDX-License-Identifier: Apache-2.0
"""Functions that read and write graphs, independent of any pass.

predicates.py    is a graph dynamic, does it convolve, is it sound; its sizes as numbers
convolution.py   a convolution read into numbers, and nodes written with their fake values
work.py          the arithmetic of nodes, and how much of it convolutions are
strides.py       how tensors lie in memory, and the strides that a rewrite must keep
"""

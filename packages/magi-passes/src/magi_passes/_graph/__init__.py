# SPDX-License-Identifier: Apache-2.0
"""Functions that read and write graphs, independent of any pass.

predicates.py    is a graph dynamic, does it convolve, does it communicate
convolution.py   a convolution read into numbers, and nodes written with their fake values
sizes.py         symbolic sizes as numbers
flops.py         the arithmetic of one node
work.py          how much of a graph's work its convolutions are
storage.py       an operator that sets the memory layout of a tensor
strides.py       the strides that a rewrite must keep
structure.py     what makes a graph impossible to compile
"""

# SPDX-License-Identifier: Apache-2.0
"""Graphs read and written, whatever passes do with them.

predicates.py    is it dynamic, does it convolve, does it communicate
convolution.py   a convolution read into numbers, and nodes written with their fake values
sizes.py         symbolic sizes as numbers
flops.py         the arithmetic of one node
work.py          how much of a graph's work its convolutions are
storage.py       how tensors lie in memory, as an operator
strides.py       what a rewrite leaves as it lies in memory
structure.py     what makes a graph impossible to compile
"""

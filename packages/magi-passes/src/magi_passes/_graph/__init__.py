# SPDX-License-Identifier: Apache-2.0
"""Functions that read and write graphs, independent of any pass.

nodes.py    is a graph dynamic, sound, how much of it convolves; convolutions read, and nodes written
strides.py  how tensors lie in memory, and the strides that a rewrite must keep
"""

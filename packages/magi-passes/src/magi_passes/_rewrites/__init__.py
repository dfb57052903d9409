# SPDX-License-Identifier: Apache-2.0
"""The passes that this package ships.

padding.py          convolutions do the zero padding that only they read; symbolic padding that is zero leaves the graph
moments.py          group norms row by row
temporal.py         3D convolutions over time as 2D ones
few_channels.py     convolutions to few channels as a product and a sum over taps
attention.py        attention that is written out, as the operator
wide_heads.py       attention that no fast kernel takes, as products
masks.py            masks of attention that are known before there is data
code_generation.py  channels-last for convolutions of symbolic size, tiles by dimension, sizes as 32-bit integers
"""

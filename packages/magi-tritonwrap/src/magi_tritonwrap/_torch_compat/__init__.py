# SPDX-License-Identifier: Apache-2.0
"""The private names of torch and Triton that this package touches: one function per quirk, with the releases served.

kernels.py    what Triton makes of a kernel, and what torch puts around it
launches.py   launches in a graph: how one is recorded, and what its node holds
operators.py  operators: their bodies, and torch's tables of decompositions and kernels
tracing.py    fake and functional tensors, active modes
"""

# SPDX-License-Identifier: Apache-2.0
"""The private names of torch and Triton that this package touches: one function per quirk, with the releases served.

kernels.py    what Triton makes of a kernel, what torch puts around it, and how a graph holds a launch
options.py    launch options: which there are, and which of them Inductor compiles a kernel with
operators.py  operators: their bodies, and torch's tables of decompositions and kernels
tracing.py    fake and functional tensors, active modes
"""

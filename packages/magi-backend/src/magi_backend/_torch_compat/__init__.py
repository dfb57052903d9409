# SPDX-License-Identifier: Apache-2.0
"""The private torch names that this package touches: one function per quirk, with the releases that it serves.

compiling.py    Inductor and Dynamo: how a graph is compiled, with which settings, what is counted, what caches hold
distributed.py process groups: their ranks, what they count, and their store
frames.py       Dynamo: the captured function, recompilations, graph breaks and times
nodes.py        nodes and graphs: what they call, what they write to, how they are cut
recording.py    CUDA graphs as torch records them
state.py        the state that a compilation reads, and what a call runs under
symbols.py      graphs with symbols, and fake tensors of one size
values.py       tensors, modules and compiled callables: what torch keeps on them

The repairs of torch's defects are in `_repairs`.
"""

from . import compiling, distributed, frames, nodes, recording, state, symbols, values


__all__ = ["compiling", "distributed", "frames", "nodes", "recording", "state", "symbols", "values"]

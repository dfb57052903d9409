# SPDX-License-Identifier: Apache-2.0
"""The private torch names that this package touches: one function per quirk, with the releases that it serves.

caches.py       the entries of torch's caches, and what they do not name
compiling.py    Inductor and Dynamo: how a graph is compiled, with which settings, and what is counted
distributed.py process groups: their ranks, what they count, and their store
frames.py       Dynamo: the captured function, recompilations, graph breaks and times
nodes.py        nodes and graphs: what they call, what they write to, how they are cut
recording.py    CUDA graphs as torch records them
state.py        the state that a compilation reads, and what a call runs under
symbols.py      graphs with symbols, and fake tensors of one size
values.py       tensors, modules and compiled callables: what torch keeps on them

The repairs of torch's defects are in `_repairs`.
"""

from . import caches, compiling, distributed, frames, nodes, recording, state, symbols, values


__all__ = ["caches", "compiling", "distributed", "frames", "nodes", "recording", "state", "symbols", "values"]

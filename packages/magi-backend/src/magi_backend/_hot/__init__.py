# SPDX-License-Identifier: Apache-2.0
"""Sizes that come back get code of their own.

A captured graph with symbolic sizes keeps the code that Inductor made for any size. In addition there is code for
single sizes, which a generated function chooses by the values of the graph's symbols.

``inputs`` reads which inputs are sizes, ``captured`` keeps a graph as it was captured, ``static`` makes the graph of
one size from it, ``moment`` says whether now is a time to compile and restores the state of the capture, ``seen``
counts sizes, ``table`` decides, ``dispatch`` writes the function that runs on each call, ``checkpoints`` lets a
recomputation run what the forward ran, ``explicit`` reads ``magi.compile_sizes``, ``outcome`` says what happened.
"""

# SPDX-License-Identifier: Apache-2.0
"""Sizes that come back get code of their own.

A captured graph with symbolic sizes keeps the code that Inductor made for any size. In addition there is code for
single sizes, which a generated function chooses by the values of the graph's symbols.

captured.py   keeps a graph as it was captured, makes the graph of one size from it, and writes what runs on each call
ranks.py      reads what a graph exchanges with other ranks, and decides with them if that is anything
background.py the thread that makes code while calls go on
table.py      counts sizes, decides which get code, and says what happened
buckets.py    pads inputs to few sizes, and cuts the outputs back
row_walk.py   follows the rows of a graph from its inputs to its outputs
rows.py       decides whether they stay apart, so that it can be padded, by a rule for each operator
recordings.py decides which sizes have a CUDA graph, by the same table
first_call.py lets eager answer until the code for any size is made
entry.py      reads `magi.compile_sizes`, and compiles a graph with all of this
"""

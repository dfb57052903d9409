# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a compilation, and who gets the record.

records.py     plain data on graphs, passes, repairs, caches: all reports are made of it
ops.py         the registered operators that a graph calls
hidden.py      the numbers that no report shows
graph_text.py  a graph as text
code.py        kernels and calls in generated code
breaks.py      graph breaks and failed guards, as Dynamo reports them
changes.py     a graph before and after each pass
plain.py       records as plain data for JSON, and back
folder.py      a file for each compilation of a run, and the folder read again
run.py         graphs of other backends, graph breaks and failures of a process
log.py         one compilation while it grows; torch's trace gets it too
collect.py     the collectors that are open where a compilation starts
"""

# SPDX-License-Identifier: Apache-2.0
"""Launches while they happen: caught, written in the form that torch takes, and put into the graph.

hook.py            the one place that every launch passes through
fake_runs.py       a run on fake tensors: what a body may ask of an address, and what it keeps
normalise.py       a launch as Triton would carry it out, for torch's higher-order op
self_contained.py  kernels that Inductor can write down again
capture.py         `capture_launches`: record, trace or drop; `wrap_kernels`, `launch_directly`
recording.py       a body run once, for the traces of one compilation to replay
checks.py          CPU tensors, and writes that a schema does not declare
body_as_fake.py    a body on fake tensors: as a fake, and to see what it launches
"""

# SPDX-License-Identifier: Apache-2.0
"""The uuid of a pass: a digest of all code and values that its work can reach.

code.py          what a code object does, and the names that it reads
library.py       whose code it is: where a walk stops
members.py       what of a class and of a function counts
value_forms.py   stable forms of values
footprint.py     what was read, to tell later whether it was replaced
walk.py          the walk from a class to all that it reaches
uuid.py          a uuid, computed once
"""

# SPDX-License-Identifier: Apache-2.0
"""How a compilation is recorded, and who gets the record.

hidden.py    a graph as text, and the numbers that no report shows
folder.py    records as JSON: a file for each compilation of a run, and the folder read again
log.py       one compilation while it grows, and the other work of a process; collectors and torch's trace get it too
"""

# SPDX-License-Identifier: Apache-2.0
"""What is known of a compilation, and who gets to hear of it.

records.py    plain data on graphs, passes, guards, caches: all reports are made of it
ops.py        the registered operators that a graph calls
plain.py      records as plain data for JSON, and back
folder.py     a file for each compilation of a run, and the folder read again
collect.py    the collectors that are open where a compilation starts, the log, torch's trace
"""

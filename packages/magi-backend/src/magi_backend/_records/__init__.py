# SPDX-License-Identifier: Apache-2.0
"""What is known of a compilation, and who gets to hear of it.

records.py    plain data on graphs, passes, guards, caches: all reports are made of it
ops.py        the registered operators that a graph calls
collect.py    the collectors that are open where a compilation starts, the log, torch's trace
"""

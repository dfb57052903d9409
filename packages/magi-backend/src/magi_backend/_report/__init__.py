# SPDX-License-Identifier: Apache-2.0
"""What happened when a function was compiled and run, to read in a terminal, a browser, or a program.

calls.py      what one explained call took, and how far it was from eager
report.py     the report
sizes.py      the sizes of a graph's calls, for both
capture.py    a capture that took long, for both
text.py       as text
html.py       as a page
again.py      a function compiled anew, whatever Dynamo has compiled of it before
explain.py    runs a function compiled and eager, and makes the report
"""

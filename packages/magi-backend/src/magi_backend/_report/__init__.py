# SPDX-License-Identifier: Apache-2.0
"""What happened when a function was compiled and run, to read in a terminal, a browser, or a program.

explain.py     runs a function compiled and eager, and makes a report; again.py compiles it anew, calls.py is a call
report.py      that report
run.py         the report of a whole run, read from its folder; compare.py is two of them
names.py       what a compilation is called; sizes.py, capture.py, times.py, advice.py what is said of it; diff.py
text.py        all of that as text
html.py        as a page, with page.css and page.js; index_html.py is its top, graphs_html.py its graphs,
               compare_html.py two runs, markup.py what they are made of
"""

# SPDX-License-Identifier: Apache-2.0
"""What happened when a function was compiled and run, to read in a terminal, a browser, or a program.

A module imports those above it only, also for types alone and inside functions, where renderers are imported.

sections.py    numbers, names and sentences of every report
whole_run.py   what a run compiled, and what to look at; compare.py pairs the compilations of two runs
text.py        reports as text
html.py        a whole page, with page.css and page.js; compare_html.py is that of two runs
report.py      the report of a function; run.py the report of a run, read from its folder, and two side by side
explain.py     runs a function compiled and eager, and makes its report
"""

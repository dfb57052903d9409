# SPDX-License-Identifier: Apache-2.0
"""What happened when a function was compiled and run, to read in a terminal, a browser, or a program.

sections.py    lines and tables of every report, and how a terminal shows them
html.py        lines, tables and a compilation for a page, with page.css and page.js
run.py         the report of a run, read from its folder, and two runs side by side
explain.py     runs a function compiled and eager, and makes its report
"""

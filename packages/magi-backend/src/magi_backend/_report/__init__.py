# SPDX-License-Identifier: Apache-2.0
"""What happened when a function was compiled and run, to read in a terminal, a browser, or a program.

A module imports those above it only.

sections.py    lines and tables of every report: numbers, names and sentences
text.py        lines and tables for a terminal
html.py        lines, tables and a compilation for a page, with page.css and page.js
run.py         the report of a run, read from its folder, and two runs side by side
explain.py     runs a function compiled and eager, and makes its report
"""

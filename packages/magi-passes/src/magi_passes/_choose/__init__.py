# SPDX-License-Identifier: Apache-2.0
"""Which of the rewrites a graph gets.

chooser.py   by a cost model of its convolutions, or by tuning
tuning.py    compile a graph with each of several plans, and remember the fastest
timing.py    time compiled graphs against each other
"""

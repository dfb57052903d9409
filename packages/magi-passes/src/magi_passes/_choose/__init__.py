# SPDX-License-Identifier: Apache-2.0
"""Which of the rewrites a graph gets.

chooser.py   by a cost model of its convolutions, or by tuning
tuning.py    compile a graph with each of several plans, time them against each other, and remember the fastest
"""

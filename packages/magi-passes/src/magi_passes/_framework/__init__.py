# SPDX-License-Identifier: Apache-2.0
"""What a pass is, and how passes run: asked, scoped, checked and recorded.

arguments.py    the types and values of a pass's fields
records.py      what passes did, and who gets the records
compilation.py  the compilation in progress
context.py      what a pass may know of it, and what it answers
declared.py     what a pass declares, and passes that are switched off
run.py          one pass at work, and the passes in one of Inductor's hooks
scope.py        the life of a compilation
graph_pass.py   the base class of every pass
pipeline.py     passes as options, as one pass, as a scope
"""

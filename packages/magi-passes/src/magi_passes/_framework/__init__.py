# SPDX-License-Identifier: Apache-2.0
"""What a pass is, and how passes run: asked, scoped, checked and recorded.

declared.py     what a pass declares and is given, checked; passes that are switched off; uuids
compilation.py  the compilation in progress: what a pass may know of it, what passes did, who gets the records
graph_pass.py   the base class of every pass, and how passes run in Inductor's hooks
pipeline.py     passes as options, as one pass, as a scope
"""

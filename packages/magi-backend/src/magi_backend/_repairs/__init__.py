# SPDX-License-Identifier: Apache-2.0
"""Known defects of torch's compiler: a file for each, found by listing this folder.

A file says what a user sees, which releases have the defect, and replaces the wrong lines, for compilations of this
backend only. A new file is all that a new repair needs.

    _defect.py    what is known of a defect
    _scope.py     where repairs are active, and how one puts a function in the place of torch's
    _aliases.py   which values of a graph share memory after a pass
    _listing.py   the defects in this folder, and those that a release has
"""

# SPDX-License-Identifier: Apache-2.0
"""The settings of one compilation.

config.py    the settings by dotted name, each with the place that its value came from, and the errors about them
options.py   the arguments of one call of the backend: our settings and Inductor's configuration
"""

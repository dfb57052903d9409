# SPDX-License-Identifier: Apache-2.0
"""The settings of one compilation.

fields.py     settings by dotted name, and the sentences about wrong names and values
sizes.py      what `compile_sizes` holds
config.py     the settings, each with the place that its value came from
options.py    the arguments of one call of the backend: our settings and Inductor's configuration
"""

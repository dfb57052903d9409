# SPDX-License-Identifier: Apache-2.0

"""The fragments of decoder_fragments, by class, line and shape.

The list was fixed before anything was measured, and none is taken out for its figure.
"""

from __future__ import annotations

from _image_fragments import IMAGE
from _video_fragments import VIDEO


DIFFUSERS = "0.42.1"
"""The release of diffusers that the lines are those of."""

FRAGMENTS = {fragment.name: fragment for fragment in (*VIDEO, *IMAGE)}

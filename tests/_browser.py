# SPDX-License-Identifier: Apache-2.0
"""A page in a headless Chromium: what it says on its console, what it asks the network for, and a picture."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REQUIRED = "MAGI_TESTS_NEED_CHROMIUM"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-default-apps", "--hide-scrollbars", "--enable-logging=stderr"),
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a request is on record, and goes nowhere
)
DARK = "--blink-settings=preferredColorScheme=0"


@dataclass(frozen=True)
class Opened:
    """What a browser did with a page: lines on its console, addresses that the page asked for, and a picture."""

    console: list[str]
    requests: list[str]
    picture: Path


def opened(page: str, folder: Path, *, width: int, script: str = "", flags: tuple[str, ...] = ()) -> Opened:
    """Open *page*, with *script* at the end of the test's copy; in a frame where a window cannot be so narrow."""
    if CHROMIUM is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and there is no chromium: apt-get install chromium")
        pytest.skip("no chromium here: apt-get install chromium")
    file, network, picture = folder / "report.html", folder / "network.json", folder / "page.png"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    shown = file
    if width < 500:
        shown = folder / "frame.html"
        shown.write_text(f"<body style='margin:0'><iframe src='{file.name}' width={width} height=3000></iframe>")
    profile = folder / f"profile-{width}"
    own = (f"--user-data-dir={profile}", f"--log-net-log={network}", f"--screenshot={picture}", *flags)
    command = [CHROMIUM, *FLAGS, *own, f"--window-size={max(width, 500)},2000", shown.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    log: dict[str, Any] = json.loads(network.read_text())
    kind = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event["params"] for event in log["events"] if event["type"] == kind and "params" in event]
    return Opened(
        re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr),
        # Requests that the browser makes by itself have no origin.
        [
            params["url"]
            for params in started
            if params.get("initiator", "not an origin") != "not an origin" and params["url"] != file.as_uri()
        ],
        picture,
    )

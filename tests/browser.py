"""A real browser, without a window: opens a page offline and tells what became of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--proxy-server=127.0.0.1:9",  # nobody is there: whatever a page asks the network for fails
    "--window-size=1300,900",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=8000",
)

CONSOLE = re.compile(r'CONSOLE[:(]\d+\)?\] "(.*)", source:')


@dataclass(frozen=True)
class Opened:
    """The elements of a page after its scripts have run, and what it said on the console."""

    dom: str
    console: list[str]


def open_page(page: Path, profile: Path) -> Opened:
    """Open a file, with a profile folder of its own. Skips the test where there is no browser."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("no Chromium at hand: apt-get install chromium")
    command = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        dom, log = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, log
    return Opened(dom, CONSOLE.findall(log))

"""Pages as a browser lays them out, by headless Chromium."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path

WIDTH = 1200

# A script in the page gives tell() what it finds, which puts it into an element of its own.
_SCRIPT = """
<script>
const tell = found => {
  const told = document.createElement("pre");
  told.id = "told";
  told.textContent = JSON.stringify(found);
  document.body.append(told);
};
addEventListener("load", () => { %s });
</script>
"""

# Texts that overlap, and what is outside of the page.
_CHECK = """
  const boxes = [...document.querySelectorAll("svg text, h1, h2, p, th, td, label")]
    .filter(each => each.textContent.trim())
    .map(each => [each.textContent.slice(0, 40), each.getBoundingClientRect()])
    .filter(([, box]) => box.width && box.height);
  const overlaps = [];
  boxes.forEach(([name, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 1 && y > 2) overlaps.push(`${name} / ${other}`);
  }));
  const cut = [...document.querySelectorAll("svg g")].filter(group => {
    const box = group.querySelector("rect").getBoundingClientRect();
    return [...group.querySelectorAll("text")].some(text =>
      text.getBoundingClientRect().right > box.right || text.getBoundingClientRect().left < box.left);
  }).map(group => group.textContent);
  tell({
    overlaps, cut, texts: boxes.length, boxes: document.querySelectorAll("svg g").length,
    widths: [...document.querySelectorAll("svg g > rect")].map(each => Number(each.getAttribute("width"))),
    width: document.documentElement.scrollWidth, background: getComputedStyle(document.body).backgroundColor,
    outside: boxes.filter(([, box]) => box.left < 0 || box.right > innerWidth).map(([name]) => name) });
"""  # noqa: E501


def chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, (
        "expected chromium on PATH, to look at pages; "
        "install it: apt-get update && apt-get install -y chromium"
    )
    return found


def _run(page, dark, *options):
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [
                chromium(),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                "--virtual-time-budget=2000",
                *options,
                page,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        ).stdout


def screenshot(path: Path, png: Path, *, dark=False, which="optimized", height=1600):
    _run(
        f"{path.as_uri()}#{which}",
        dark,
        f"--window-size={WIDTH},{height}",
        f"--screenshot={png}",
    )


def told_by(path: Path, script: str, *, dark=False, which="optimized"):
    """What `script` gives tell() when the page is loaded."""
    checked = path.with_suffix(f".{which}.html")
    checked.write_text(path.read_text().replace("</body>", _SCRIPT % script + "</body>"))
    html = _run(f"{checked.as_uri()}#{which}", dark, f"--window-size={WIDTH},1600", "--dump-dom")
    return json.loads(unescape(re.search(r'<pre id="told">(.*?)</pre>', html, re.DOTALL)[1]))


def laid_out(path: Path, *, dark=False, which="optimized"):
    """What the check finds in the page: overlaps, outside, texts, boxes, width, background."""
    return told_by(path, _CHECK, dark=dark, which=which)

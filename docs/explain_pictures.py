"""Makes the pictures of docs/explain.md and docs/profile.md: explains two models, profiles one of
them, and photographs the pages.

python docs/explain_pictures.py

Needs Chromium (apt-get install -y chromium)."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch

import torch_blocked
from torch_blocked.bench import models

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "test"))

from helpers import browser, hard_cases  # noqa: E402

# Name of the picture: what is explained, and how it is shown.
PICTURES = {
    "light": ("custom_op", {"height": 1640}),
    "dark": ("custom_op", {"height": 1640, "dark": True}),
    "eager": ("custom_op", {"height": 1500, "which": "eager"}),
    "shufflenet": ("helpers.networks.shufflenet:shufflenet_v2", {"height": 1500}),
}


PROFILE_HEIGHT = 830


def profiled(name: str) -> torch_blocked.profile:
    """A call on a blocked input, the weights packed before."""
    factory, x = hard_cases.CASES[name]
    model, blocked = factory(), x.to_blocked()
    with torch.no_grad():
        model(blocked)
        with torch_blocked.profile() as p:
            model(blocked)
    return p


def explained(name: str) -> torch_blocked.Explanation:
    if name in hard_cases.CASES:
        factory, x = hard_cases.CASES[name]
        found = torch_blocked.explain(factory(), (x,))
    else:
        model = models.load(name, (3, 224, 224))
        found = torch_blocked.explain(model.module, model.random_input(1))
    found.name = name.rpartition(":")[2]
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        pages: dict[str, Path] = {}
        for picture, (name, options) in PICTURES.items():
            if name not in pages:
                pages[name] = Path(folder) / f"{name}.html"
                explained(name).to_html(pages[name])
            browser.screenshot(pages[name], FOLDER / f"explain_{picture}.png", **options)
        page = Path(folder) / "profile.html"
        profiled("custom_op").to_html(page)
        for dark in (False, True):
            png = FOLDER / f"profile_{'dark' if dark else 'light'}.png"
            browser.screenshot(page, png, dark=dark, height=PROFILE_HEIGHT)


if __name__ == "__main__":
    main()

"""Take the pictures of the translation page that the README and docs/serve.md show.

    pip install playwright && python docs/pictures.py

It needs Chromium. `--phone FILE` takes the page on a phone instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from minitransformer import load
from minitransformer.commands.libretranslate import Direction
from minitransformer.commands.serve import Server
from minitransformer.runs.models import shipped_models

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import open_tab  # noqa: E402
from support.serving import running  # noqa: E402

TEXT = "Where is the station? I am hungry.\nCould you help me with my homework?"


def take(address: str, path: Path, width: int, colours: str) -> None:
    """Type the text, ask for other words, and point at the word."""
    size = {"width": width, "height": 600}
    with open_tab(viewport=size, color_scheme=colours, device_scale_factor=1.5) as tab:
        tab.goto(address)
        tab.locator("textarea").fill(TEXT)
        word = tab.locator("#translation p").nth(1).get_by_role("button").first
        word.click()
        tab.locator(".alternatives button").first.wait_for()
        tab.mouse.move(0, 0)
        word.hover()
        tab.screenshot(path=path, full_page=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--phone", type=Path, metavar="FILE")
    args = parser.parse_args()
    directions = [Direction.of(load(path), path) for path in shipped_models()]
    with running(Server(directions)) as server:
        if args.phone:
            take(server.address, args.phone, 390, "light")
        else:
            images = ROOT / "docs" / "img"
            take(server.address, images / "translate-page.png", 900, "light")
            take(server.address, images / "translate-page-dark.png", 900, "dark")


if __name__ == "__main__":
    main()

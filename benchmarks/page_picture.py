"""Takes the pictures of the comparison page that the README shows: wide and narrow, light and dark.

    rlhf-zoo compare NAMESPACE/NAME-ppo --hub local --port 7860 &
    python benchmarks/page_picture.py http://127.0.0.1:7860

They are screenshots of the page as it opens: the wide ones from its title to the end of both answers, without the list
of prompts, the narrow ones of the answers alone.
"""

import argparse
import base64
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

#: Name of the file -> width of the window. On a phone, 520 pixels are shown at two thirds of their size.
WIDTHS = {"compare": 1080, "compare-narrow": 520}
READY = "#pairs .zoo-pairs[data-state=done]"
MARGIN = 6
#: Hides the list of prompts, and returns where the answers begin and end.
FIND_ANSWERS = """document.querySelector('#examples').style.display = 'none';
const boxes = [...document.querySelectorAll('#pairs .zoo-card')].map(card => card.getBoundingClientRect());
const ends = [Math.min(...boxes.map(box => box.top)), Math.max(...boxes.map(box => box.bottom))];
return ends.map(y => y + window.scrollY)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="of the page that `rlhf-zoo compare` serves")
    address = parser.parse_args().address
    from chromium import chromium

    with tempfile.TemporaryDirectory() as home, chromium(Path(home), reach=urlsplit(address).hostname) as browser:
        for theme in ("light", "dark"):
            for name, width in WIDTHS.items():
                suffix = "" if theme == "light" else "-dark"
                _save(_picture(browser, f"{address}/?__theme={theme}", width), ROOT / f"docs/{name}{suffix}.png")


def _picture(browser: Any, address: str, width: int) -> bytes:
    """A screenshot down to the end of both answers: from the title, or of a narrow page from their beginning."""
    is_narrow = width == WIDTHS["compare-narrow"]
    size = {"width": width, "height": 1100, "deviceScaleFactor": 1, "mobile": is_narrow}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.set_page_load_timeout(600)
    browser.get(address)
    deadline = time.monotonic() + 600
    while not browser.find_elements("css selector", READY):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{address} has shown no answers for ten minutes.")
        time.sleep(0.5)
    time.sleep(2)  # the last transition
    first, last = browser.execute_script(FIND_ANSWERS)
    top = first - MARGIN if is_narrow else 0
    clip = {"x": 0, "y": top, "width": width, "height": last + MARGIN - top, "scale": 1}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(taken["data"])


def _save(picture: bytes, path: Path) -> None:
    """As a PNG of 128 colors, which takes a third of the bytes."""
    small = BytesIO()
    Image.open(BytesIO(picture)).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    path.write_bytes(small.getvalue())


if __name__ == "__main__":
    main()

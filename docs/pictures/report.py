"""Take pictures of a report: `python docs/pictures/report.py runs/comfed-digits/report.html`.

Needs Chromium; writes report-desktop.png and report-narrow.png beside this file.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from report.chromium import Chromium, find  # noqa: E402

WINDOWS = {"report-desktop.png": (1200, 1000), "report-narrow.png": (400, 1000)}


def main(page: Path) -> None:
    program = find()
    if program is None:
        raise SystemExit("no Chromium found: install one to take pictures")
    with tempfile.TemporaryDirectory() as home:
        browser = Chromium(program, Path(home))
        try:
            for name, (width, height) in WINDOWS.items():
                tab = browser.open(page.resolve(), width=width)
                tab.resize(width, height)
                shot = tab.send("Page.captureScreenshot")["data"]
                (HERE / name).write_bytes(base64.b64decode(shot))
                tab.close()
        finally:
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

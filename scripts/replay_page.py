"""Write the table of states into docs/replay.md, between its two marks."""

from __future__ import annotations

from pathlib import Path

from undrift.replay.letters import documented, markdown

PAGE = Path(__file__).parent.parent / "docs/replay.md"
START, END = "<!-- states: written by scripts/replay_page.py -->\n", "<!-- end of states -->\n"


def page(old: str) -> str:
    """Give the page with the present table."""
    before, _, rest = old.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{markdown(documented())}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    print(f"{PAGE.name}: {len(documented())} algorithms")

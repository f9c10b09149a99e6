"""Write docs/all-digits.md from the records: tables as `undrift compare` prints them, settings."""

from __future__ import annotations

from algorithm_facts import entries, facts_of
from algorithm_records import EXPERIMENTS, Timed, choices, comparison, lines, lines_kept, timed


def digits_page() -> str:
    """Write the page."""
    text = facts_of("digits")
    main = EXPERIMENTS[0]
    parts = [
        text["intro"],
        "## The comparison\n\n" + made_by(timed(main), main),
        results(main),
        text["pictures"],
        "## What to read in it\n\n" + text["reading"],
        "## How each was set\n\n" + text["tuning"],
        set_so(main),
    ]
    for name in EXPERIMENTS[1:]:
        parts += [f"## {text[name]['title']}\n\n{text[name]['text'].strip()}",
                  made_by(timed(name), name), results(name), set_so(name)]  # fmt: skip
    return "\n\n".join(p.strip("\n") for p in parts) + "\n"


def made_by(found: Timed, name: str) -> str:
    """Say which command made it, and how long that took."""
    runs = lines_kept(name)
    return (
        f"`{found.command}`: {len(runs)} runs of {runs[0]['rounds']} rounds, "
        f"{found.seconds:.0f} s on {found.cpus} shared cores (torch {found.torch}, no GPU)."
    )


def results(name: str) -> str:
    """Write the table of a comparison, names as links, best first after the baseline."""
    compared = comparison(name)
    first, *others = lines(name)
    ordered = [first, *sorted(others, key=lambda line: -line.last.mean)]
    head = compared.header()
    rows = [[linked(line.label), *compared.cells(line)[1:]] for line in ordered]
    notes = [n for n in compared.notes() if "difference to" not in n]
    return "\n\n".join([_table(head, rows), *notes])


def set_so(name: str) -> str:
    """List the settings and the reason for each."""
    rows = [[linked(label), c.settings, c.why] for label, c in choices(name).items()]
    return _table(["algorithm", "settings", "from"], rows)


def linked(label: str) -> str:
    """Link an algorithm that has a page."""
    return f"[{label}](algorithms/{label}.md)" if label in entries() else label


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)] if len(head) > 3 else ["---"] * len(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])

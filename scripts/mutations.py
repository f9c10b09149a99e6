"""Plant mistakes in every rule and count who notices: `undrift verify`, else the tests.

    python scripts/mutations.py                 # all rules; writes docs/mutations.md
    python scripts/mutations.py FedDyn Prox     # some; no page
    python scripts/mutations.py --page          # the page again, of what the record has

A mistake is one change in one method: a flipped sign, a lost factor, a state that is not kept, a
wrong weight, a swapped branch, a wrong start.  Each lives in a process of its own, forked after
everything is imported; nothing on disk changes.
"""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mutations_made import Mutation, mutations_of, planted, rule_classes

from undrift.core.algorithm import Algorithm
from undrift.experiment.pool import cores
from undrift.rules.named import catalogue
from undrift.verify.block_cases import BLOCK_CASES
from undrift.verify.bridge import local_of
from undrift.verify.cases import CASES
from undrift.verify.identities import IDENTITIES
from undrift.verify.table import BUILDS, LR, PROMISES, verdict

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mutations.md"
RECORD = ROOT / "docs" / "records" / "mutations.txt"  # what is judged is not judged again
LONGEST = 600  # seconds; verify and these tests take less
TESTS = ["tests/replay/test_*", "tests/rules/test_*", "tests/proofs/test_identities.py"]
LEFT_OUT = ["tests/rules/test_checked.py"]  # slow, and compares no formula


class Found(NamedTuple):
    """Who noticed a mistake, if anybody."""

    mutation: Mutation
    by: str  # "verify", "tests" or ""


def parts_of(algorithm: Algorithm) -> set[type]:
    server = [] if algorithm.server is None else [algorithm.server]
    found = {type(p) for p in (*algorithm.rules, algorithm.local, algorithm.aggregate, *server)}
    return {base for kind in found for base in kind.__mro__}


def users() -> dict[str, set[type]]:
    """Say which classes take part in an algorithm's row of the table."""
    used: dict[str, set[type]] = {name: set() for name in catalogue()}
    for name in used:
        used[name] |= parts_of(BUILDS.get(name, lambda n=name: catalogue()[n].build(lr=LR))())
    for case in (*CASES, *BLOCK_CASES):
        used[case.of] |= parts_of(case.build(local_of(case.local)))
    for identity in IDENTITIES:
        used[identity.of] |= parts_of(identity.left())
    return used


def noticed_by_verify(mutation: Mutation, names: list[str]) -> bool:
    with planted(mutation):
        for name in names:
            try:
                if not verdict(name).holds:
                    return True
            except Exception:
                return True
    return False


def noticed_by_tests(mutation: Mutation | None, files: list[str]) -> bool:
    os.chdir(ROOT)
    mistake = nullcontext() if mutation is None else planted(mutation)
    with mistake, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
        return pytest.main([*files, *options]) != pytest.ExitCode.OK


def sound_tests(pool: ThreadPoolExecutor) -> dict[str, str]:
    """Read the test files that pass without any mistake; only those can notice one."""
    paths = [str(p.relative_to(ROOT)) for t in TESTS for p in sorted(ROOT.glob(t))]
    paths = [p for p in paths if p not in LEFT_OUT]
    if os.environ.get("UNDRIFT_TESTS_PASS"):  # known already, and this takes minutes
        return {path: (ROOT / path).read_text() for path in paths}
    failing = pool.map(lambda path: in_a_fork(noticed_by_tests, None, [path]), paths)
    broken = [path for path, fails in zip(paths, failing, strict=True) if fails]
    for path in broken:
        print(f"{path} fails without any mistake and is left out", file=sys.stderr)
    return {path: (ROOT / path).read_text() for path in paths if path not in broken}


def in_a_fork(function, *arguments) -> bool:
    """Call in a forked process; dying counts as being noticed, taking too long does not."""
    context = get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=lambda: answers.put(function(*arguments)))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
        return False
    return True if answers.empty() else bool(answers.get())


def judge(mutation: Mutation, names: list[str], tests: dict[str, str]) -> Found:
    if names and in_a_fork(noticed_by_verify, mutation, names):
        return Found(mutation, "verify")
    own = mutation.kind_of.__name__.lower()  # who speaks of it most is asked first
    first = sorted(tests, key=lambda path: -tests[path].lower().count(own))
    return Found(mutation, "tests" if in_a_fork(noticed_by_tests, mutation, first) else "")


def rows_for(kind: type, used: dict[str, set[type]]) -> list[str]:
    """Choose which rows to run: cheap ones first, and not all of ComFed's."""
    names = [n for n, parts in used.items() if kind in parts]
    return sorted(names, key=lambda n: (n in PROMISES, n.startswith("comfed")))[:4]


def judged() -> dict[str, str]:
    """Read the record: a mistake, and who noticed it."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return {text: by.strip() for by, _, text in (line.partition("\t") for line in lines)}


def main(wanted: list[str]) -> int:
    torch.set_num_threads(1)
    if wanted == ["--page"]:  # of what the record has
        known = judged()
        planned = [m for k in rule_classes() for m in mutations_of(k)]
        found = [Found(m, known[str(m)].replace("-", "")) for m in planned if str(m) in known]
        write_page(page(rule_classes(), found, len(planned)))
        return 0
    used, known = users(), judged()
    kinds = [k for k in rule_classes() if not wanted or k.__name__ in wanted]
    planned = [(m, rows_for(k, used)) for k in kinds for m in mutations_of(k)]
    jobs = [(m, names) for m, names in planned if str(m) not in known]
    with ThreadPoolExecutor(cores()) as pool:
        tests = sound_tests(pool) if jobs else {}
        for done in as_completed([pool.submit(judge, *job, tests) for job in jobs]):
            one = done.result()
            known[str(one.mutation)] = one.by
            with RECORD.open("a") as record:
                record.write(f"{one.by or '-'}\t{one.mutation}\n")
            print(f"{one.by or 'SURVIVES':8} {one.mutation}", flush=True)
    found = [Found(m, known[str(m)].replace("-", "")) for m, _ in planned]
    if not wanted:
        write_page(page(kinds, found, len(planned)))
    caught = sum(bool(f.by) for f in found)
    print(f"{caught} of {len(found)} noticed ({100 * caught / len(found):.1f} %)")
    return 0 if caught >= 0.95 * len(found) else 1


# Survivors that are no mistakes: the result is the same.
SAME = {
    "ScaffoldLiteral.direction": "what is added is zero by definition",
    "MeanBy.weight": "the sign cancels between the sum and the sum of weights",
    "RFedAvgAtStart.probe": "a value and its weight change sign together; only their ratio counts",
    "RFedAvgPlusAtStart.probe": "as for RFedAvgAtStart",
    "FedDynExact.direction": "`after_step` replaces whatever the gradient does",
    "QFair.weight": "weighs BatchNorm's buffers alone, where the sign cancels",
    "Watch.server": "the rows that are replaced have weight 0; any finite number will do",
}

HEAD = """# Mistakes that were planted

`python scripts/mutations.py` changes one line of one rule at a time (a flipped sign, a lost factor,
a state that is not kept, a wrong weight, a swapped branch, a wrong start) and asks who notices:
`undrift verify`, and, if it does not, the tests in {tests}.
{judged}
**{caught} of {all} are noticed ({share:.1f} %)**: {verify} by `undrift verify`, {alone} by the
tests alone. {rules} rules; [the record](records/mutations.txt) has them all.

## Survivors

{survivors}

## By rule

| rule | planted | verify | tests | survive |
|---|---:|---:|---:|---:|
"""


def write_page(text: str) -> None:
    """Write our part of the page; mutations_guards.py writes the section behind it."""
    _, theirs, rest = PAGE.read_text().partition("\n## What keeps damage out")
    PAGE.write_text(text + theirs + rest)


def page(kinds: list[type], found: list[Found], planned: int) -> str:
    by = Counter(f.by for f in found)
    left = [f.mutation for f in found if not f.by]
    lines = [
        f"- `{m.where}`, {m.kind}: `{m.before}` → `{m.after}`"
        + (f" (no mistake: {SAME[m.where]})" if m.where in SAME else "")
        for m in left
    ]
    text = HEAD.format(
        tests=", ".join(f"`{t}`" for t in TESTS),
        judged=""
        if len(found) == planned
        else f"{len(found)} of the {planned} planned mistakes have been judged so far.\n",
        caught=len(found) - by[""],
        all=len(found),
        share=100 * (1 - by[""] / len(found)),
        verify=by["verify"],
        alone=by["tests"],
        rules=len(kinds),
        survivors="\n".join(lines) or "None.",
    )
    for kind in kinds:
        mine = Counter(f.by for f in found if f.mutation.kind_of is kind)
        counts = sum(mine.values()), mine["verify"], mine["tests"], mine[""]
        if not counts[0]:
            continue
        text += f"| {kind.__name__} | {' | '.join(map(str, counts))} |\n"
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

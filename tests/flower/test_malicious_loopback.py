"""A malicious silo of three on the loopback interface: TLS, keys, Flower's own processes.

In each round it does something else.  Slow: Flower starts a process for every message.
"""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="pip install 'undrift[flower]'")

from federated.malice import REPORTS, SILENT
from flower.test_cut_off import VICTIM, tried
from undrift.deploy.folder import silo
from undrift.experiment.folder import RunFolder

__all__ = ["tried"]

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

TESTS = Path(__file__).parent.parent
# Flower itself has no empty arrays, and says in its own words that an app has failed
OTHERWISE = {"an empty message": "without a report", "an error": "Flower error"}
OTHERWISE |= {"a process that ends": "Flower error|started again|no answer"}
EACH = 8  # kinds in a run
KINDS = {**REPORTS, **SILENT}
NAMES = [name for name, kind in KINDS.items() if kind.algorithm == "scaffold" and not kind.honest]
PARTS = [NAMES[start : start + EACH] for start in range(0, len(NAMES), EACH)]

LOADER = """

import sys
from pathlib import Path

sys.path.insert(0, {tests!r})

from federated.malice import REPORTS, SILENT, Silo
from undrift.federated.node import Node

KINDS, names, inner = {{**REPORTS, **SILENT}}, {names!r}, Node.answer


def answer(self, common, own):
    kind_of = lambda round: KINDS[names[round]]
    return Silo(lambda *asked: inner(self, *asked), kind_of, Path({past!r}))(common, own)


Node.answer = answer
"""


@pytest.mark.parametrize("names", PARTS, ids=lambda names: names[0])
def test_whatever_a_silo_does_the_others_go_on_to_the_right_numbers(names, tried, tmp_path):
    def prepared(place):
        loader = silo(place, VICTIM) / "loader.py"
        told = {"tests": str(TESTS), "names": names, "past": str(tmp_path / "past")}
        loader.write_text(loader.read_text() + LOADER.format(**told))

    seconds = 120.0 if "no answer, ever" in names else 600.0
    one = tried(len(names), prepared=prepared, seconds=seconds, returning=5.0)
    assert one.wait(1500) == 0, one.said("run")[-3000:]
    one.assert_right()
    history = RunFolder(one.out).history()
    assert [record["skipped"] for record in history] == [[VICTIM]] * len(names)
    lines = (one.out / "refused.jsonl").read_text().splitlines()
    refused = {(r["round"], r["client"]): r["cause"] for r in map(json.loads, lines)}
    assert refused.keys() == {(round, VICTIM) for round in range(len(names))}
    for round, name in enumerate(names):
        wanted = OTHERWISE.get(name, KINDS[name].cause)
        assert re.search(wanted, refused[round, VICTIM]), (name, refused[round, VICTIM])

"""One malicious silo of three: the numbers are those of the others, whatever it does.

The run is the one that Flower's server app starts; only the wire is within this process.
"""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file

from federated.malice import GREETINGS, REPORTS, SILENT, Kind, Letter, Silo
from federated.test_hostile import Wire
from federated.test_resume import LOADED, loaded
from undrift.core.tree import leaves
from undrift.data import Everyone
from undrift.deploy.folder import Wanted, init
from undrift.experiment.spec import load
from undrift.federated.exchange import Patience
from undrift.federated.grid import LocalGrid
from undrift.federated.project import Project, node_of, read_project, share
from undrift.federated.running import run_deployed
from undrift.federated.server import Coordinator

__all__ = ["loaded"]

ROUNDS, MALICIOUS, FIRST = 2, 2, 77
SETTINGS = [
    *(f"rounds={ROUNDS}", "partition.clients=3", "sampler.count=3", "task.dtype=float64"),
    *("work.epochs=1", "work.batch=64", "model.hidden=4"),
]


class Federation:
    """A project of three silos, and what its runs come to."""

    def __init__(self, folder, algorithm):
        self.folder, self.runs = folder, 0
        feature = ["task.feature=feature"] if algorithm == "rfedavg" else []
        [experiment] = load("digits", [*SETTINGS, *feature, f"algorithm.use={algorithm}"])
        experiment = dataclasses.replace(experiment, sampler=Everyone())
        init(folder / "p", experiment, Wanted(insecure=True))
        project = read_project(folder / "p" / "app" / "silos")
        # keys that are not looked at: a wire within a process vouches for its nodes
        self.project = dataclasses.replace(
            project, keys=("a", "b", "c"), patience=Patience(60.0), joining=60.0
        )
        self.known = {}

    def grid(self, kind=None, honest=0):
        """Three nodes, one of which is malicious after some honest rounds."""
        self.runs += 1
        handlers = {}
        for client in range(3):
            LOADED[client] = share(self.project.experiment, client)
            place = self.folder / f"nodes-{self.runs}-{client}"
            loader = "federated.test_resume:loaded"
            handlers[FIRST + client] = node_of(
                self.project, self.folder, client, place, loader
            ).answer
        if kind is not None:
            past = self.folder / f"past-{self.runs}"
            handlers[FIRST + MALICIOUS] = Silo(
                handlers[FIRST + MALICIOUS], lambda r: kind if r >= honest else None, past
            )
        return LocalGrid(handlers, {FIRST + client: client for client in range(3)})

    def ran(self, grid, **changes):
        """Run it; the numbers that are in its folder, and what was refused."""
        folder = self.folder / f"run-{self.runs}"
        history = run_deployed(dataclasses.replace(self.project, **changes), grid, folder)
        lines = folder / "refused.jsonl"
        refused = (
            [json.loads(line) for line in lines.read_text().splitlines()]
            if (lines.is_file())
            else []
        )
        return Outcome(folder, history, load_file(folder / "model.safetensors"), refused)

    def honest(self, phase="train", rounds=0):
        """The run in which the malicious silo says nothing in a phase, after some rounds."""
        key = phase, rounds
        if key not in self.known:
            answers = [0]

            def silent(at, answer):
                answers[0] += at == phase and answer.node == FIRST + MALICIOUS
                bad = at == phase and answer.node == FIRST + MALICIOUS and answers[0] > rounds
                return [] if bad else [answer]

            grid = self.grid()
            if phase == "hello":
                del grid.handlers[FIRST + MALICIOUS]
            self.known[key] = self.ran(Wire(grid, silent))
        return self.known[key]


@dataclasses.dataclass
class Outcome:
    folder: object
    history: object
    model: dict
    refused: list

    def same_as(self, other):
        names = ("test_accuracy", "test_loss", "train_loss")
        rows = [[one[n] for n in names] for one in self.history]
        assert rows == [[one[n] for n in names] for one in other.history]
        assert all(torch.equal(v, other.model[n]) for n, v in self.model.items())


@pytest.fixture(autouse=True)
def sound(monkeypatch):
    """Look after every round of every run whether all numbers of the server are finite."""
    inner = Coordinator.advance

    def checked(self):
        done = inner(self)
        assert all(bool(torch.isfinite(v).all()) for v in leaves(self.server))
        return done

    monkeypatch.setattr(Coordinator, "advance", checked)


@pytest.fixture(scope="module")
def federations(tmp_path_factory):
    made = {}

    def make(algorithm):
        if algorithm not in made:
            made[algorithm] = Federation(tmp_path_factory.mktemp(algorithm), algorithm)
        return made[algorithm]

    return make


def wanting_two(monkeypatch):
    """The run begins when the two honest silos are there."""
    door = Project.door.fget
    wanted = property(lambda project: door(project)._replace(wanted=frozenset({0, 1})))
    monkeypatch.setattr(Project, "door", wanted)


def test_there_are_many_kinds():
    assert len(REPORTS) + len(GREETINGS) + len(SILENT) >= 60


@pytest.mark.parametrize("name", REPORTS)
def test_a_malicious_report_changes_nothing_and_is_in_the_log(name, federations):
    kind: Kind = REPORTS[name]
    federation = federations(kind.algorithm)
    found = federation.ran(federation.grid(kind, kind.honest))
    found.same_as(federation.honest(kind.phase, kind.honest))
    told = [one for one in found.refused if one["phase"] == kind.phase]
    assert {one["client"] for one in told} == {MALICIOUS}
    assert [one["round"] for one in told] == list(range(kind.honest, ROUNDS))
    assert all(re.search(kind.cause, one["cause"]) for one in told), told
    assert all(one["cause"].isprintable() for one in told)
    for record in list(found.history)[kind.honest :]:
        assert record["skipped"] == [MALICIOUS]


@pytest.mark.parametrize("name", GREETINGS)
def test_a_malicious_greeting_lets_nobody_in(name, federations, monkeypatch):
    wanting_two(monkeypatch)
    kind, federation = GREETINGS[name], federations("scaffold")
    found = federation.ran(federation.grid(kind))
    found.same_as(federation.honest("hello"))
    assert {one["phase"] for one in found.refused} == {"hello"}
    assert re.search(kind.cause, found.refused[0]["cause"]), found.refused


def test_a_silo_that_never_answers_costs_the_patience_and_no_more(federations):
    federation, kind = federations("scaffold"), SILENT["no answer, ever"]
    found = federation.ran(federation.grid(kind), patience=Patience(4.0))
    found.same_as(federation.honest())
    assert [one["cause"] for one in found.refused] == ["no answer within 4 s"] * ROUNDS
    assert all(record["seconds"] < 30 for record in found.history)


def test_of_two_answers_the_first_one_counts(federations):
    federation = federations("scaffold")

    def twice(phase, answer):
        if phase != "train" or answer.node != FIRST + MALICIOUS:
            return [answer]
        other = Letter(answer.data).change("0.total.0", lambda v: 2 * v).write()
        return [answer, answer._replace(data=other)]

    found = federation.ran(Wire(federation.grid(), twice))
    wanted = federation.ran(federation.grid())
    found.same_as(wanted)
    assert [one["cause"] for one in found.refused] == ["a second answer"] * ROUNDS


def test_of_two_nodes_with_one_key_one_takes_part(federations):
    """Whichever it is: what comes from one client counts once."""
    federation = federations("fedavg")
    grid = federation.grid()
    grid.handlers[99] = grid.handlers[FIRST + MALICIOUS]
    grid.clients[99] = MALICIOUS
    found = federation.ran(grid)
    found.same_as(federation.ran(federation.grid()))
    assert f"client {MALICIOUS} is node" in found.refused[0]["cause"]


def test_a_node_with_the_key_of_another_cannot_be_told_and_harms_as_one_does(federations):
    """A stolen key is that silo: a huge report of its second node is refused, and no other."""
    federation, kind = federations("fedavg"), REPORTS["finite and huge"]
    grid = federation.grid()
    past = federation.folder / "past-of-99"
    grid.handlers[99] = Silo(grid.handlers[FIRST + MALICIOUS], lambda r: kind, past)
    grid.clients[99] = MALICIOUS
    found = federation.ran(grid)
    assert {one["client"] for one in found.refused} == {MALICIOUS}


@pytest.mark.parametrize("growth", [1.5, 3.0, 100.0])
def test_a_report_that_grows_slowly_is_refused_when_it_is_long(growth, federations):
    """Until then it is within what an honest silo may send; then the others go on."""
    federation, rounds, asked = federations("fedavg"), 12, []
    grid = federation.grid()
    engine = grid.handlers[FIRST + MALICIOUS].__self__.engine
    inner = engine.trained

    def growing(algo, broadcast, client, work):
        state, report, row = inner(algo, broadcast, client, work)
        asked.append(growth ** int(broadcast.round))
        (delta, weight), factor = report.total, asked[-1]
        return state, report._replace(total=(factor * delta, weight)), row

    engine.trained = growing
    longer = dataclasses.replace(federation.project.experiment, rounds=rounds)
    found = federation.ran(grid, experiment=longer)
    refused = [one["round"] for one in found.refused]
    assert refused[-1] == rounds - 1 and all(one["client"] == 2 for one in found.refused)
    assert all("limits.relative" in one["cause"] for one in found.refused)
    counted = [factor for round, factor in enumerate(asked) if round not in refused]
    assert max(counted) < 40 and asked[len(counted)] > 10
    silent = Wire(federation.grid(), lambda at, a: [a][at == "train" and a.node == FIRST + 2 :])
    alone = federation.ran(silent, experiment=longer)
    assert found.history[-1]["test_loss"] <= alone.history[-1]["test_loss"] + 0.1

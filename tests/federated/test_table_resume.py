"""Over tables, too, whatever is killed goes on with the same numbers."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from federated.clinics import brief, deployed, furthest, own_files, preparation
from federated.test_hostile import Wire
from undrift.core.tree import EMPTY
from undrift.errors import ChangedExperiment, CheckpointError, EmptyRoundError, FederationError
from undrift.federated.running import run_deployed
from undrift.federated.wire import pack, words_of
from undrift.state import disk


class Crash(BaseException):
    pass


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A project, and its run that nothing stopped."""
    folder = tmp_path_factory.mktemp("steady")
    project = brief(deployed(folder, "algorithm.use=scaffold", "rounds=2"))
    run_deployed(project, own_files(folder, project, folder / "state", True), folder / "run")
    return folder, project


# 4 greetings, 4 answers to each of 3 questions, 4 preparations, 8 reports, 4 models
POINTS = {"hello": 3, "question 1": 6, "question 3": 15, "prepare": 18, "train": 26, "model": 30}


@pytest.mark.parametrize("at", POINTS)
def test_a_server_killed_in_any_phase_goes_on_with_the_same_numbers(at, steady, tmp_path):
    folder, project = steady
    count = [POINTS[at]]

    def dying(phase, answer):
        count[0] -= 1
        if not count[0]:
            raise Crash
        return [answer]

    nodes = own_files(folder, project, tmp_path / "state", True)
    with pytest.raises(Crash):
        run_deployed(project, Wire(nodes, dying), tmp_path / "run")
    began = (tmp_path / "run" / "members.json").is_file()
    assert began == (at not in ("hello", "question 1", "question 3"))
    nodes = own_files(folder, project, tmp_path / "state", True)
    run_deployed(project, nodes, tmp_path / "run")
    assert preparation(tmp_path / "run") == preparation(folder / "run")
    assert furthest(tmp_path / "run", folder / "run") == 0
    for client in range(4):
        assert list((tmp_path / "state" / f"client-{client}").rglob("model.safetensors"))


@pytest.mark.parametrize("name", ["preparation.json", "members.json"])
@pytest.mark.parametrize("after", [False, True])
def test_a_server_killed_while_it_writes_who_takes_part(name, after, steady, tmp_path, monkeypatch):
    folder, project = steady
    real = disk._os_replace

    def dying(source, target):
        if str(target).endswith(name):
            if after:
                real(source, target)
            raise Crash
        real(source, target)

    nodes = own_files(folder, project, tmp_path / "state", True)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_os_replace", dying)
        with pytest.raises(Crash):
            run_deployed(project, nodes, tmp_path / "run")
    run_deployed(project, nodes, tmp_path / "run")
    assert furthest(tmp_path / "run", folder / "run") == 0


def prepared_only(folder, project, state, out):
    """Kill the server as soon as round 1 begins."""

    def dying(phase, answer):
        if phase == "train":
            raise Crash
        return [answer]

    with pytest.raises(Crash):
        run_deployed(project, Wire(own_files(folder, project, state, True), dying), out)


def test_a_node_whose_folder_is_gone_gets_the_preparation_again(steady, tmp_path):
    folder, project = steady
    prepared_only(folder, project, tmp_path / "state", tmp_path / "run")
    shutil.rmtree(tmp_path / "state" / "client-2")
    nodes = own_files(folder, project, tmp_path / "state")
    run_deployed(project, nodes, tmp_path / "run")
    assert furthest(tmp_path / "run", folder / "run") == 0
    assert not (tmp_path / "run" / "refused.jsonl").exists()


def test_a_node_that_misses_the_preparation_gets_it_before_the_next_round(steady, tmp_path):
    folder, project = steady
    lost = []

    def losing(phase, answer):
        if phase == "prepare" and answer.node == 72 and not lost:
            lost.append(answer.node)
            shutil.rmtree(tmp_path / "state" / "client-2")
        return [answer]

    nodes = own_files(folder, project, tmp_path / "state")
    history = run_deployed(project, Wire(nodes, losing), tmp_path / "run")
    assert [r["skipped"] for r in history] == [[2], []]
    refused = (tmp_path / "run" / "refused.jsonl").read_text()
    assert "not on this node yet" in refused and refused.count("\n") == 1


def test_a_node_that_holds_another_preparation_refuses(steady, tmp_path):
    folder, project = steady
    prepared_only(folder, project, tmp_path / "state", tmp_path / "run")
    made = preparation(tmp_path / "run")
    made["parts"][0]["fill"] += 1.0
    (tmp_path / "run" / "preparation.json").write_text(json.dumps(made))
    nodes = own_files(folder, project, tmp_path / "state", True)
    with pytest.raises(EmptyRoundError):
        run_deployed(project, nodes, tmp_path / "run")
    assert "another preparation of this run" in (tmp_path / "run" / "refused.jsonl").read_text()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda made: "{", CheckpointError),
        (lambda made: json.dumps({**made, "rows": "many"}), CheckpointError),
        (lambda made: None, CheckpointError),
        (
            lambda made: json.dumps(made).replace('"fill": "mean"', '"fill": "zero"', 1),
            ChangedExperiment,
        ),
    ],
    ids=["cut off", "damaged", "gone", "other columns"],
)
def test_a_damaged_preparation_of_the_server_is_one_clear_error(spoil, error, steady, tmp_path):
    folder, project = steady
    prepared_only(folder, project, tmp_path / "state", tmp_path / "run")
    path = tmp_path / "run" / "preparation.json"
    text = spoil(preparation(tmp_path / "run"))
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=r"preparation\.json"):
        run_deployed(project, own_files(folder, project, tmp_path / "state", True), path.parent)


def requests_of(folder, project, state, phases):
    """Record what client 0 is asked in these phases."""
    asked, nodes = [], own_files(folder, project, state, True)
    inner = nodes.handlers[70]

    def spy(common, own):
        if words_of(own)["phase"] in phases:
            asked.append((common, own))
        return inner(common, own)

    nodes.handlers[70] = spy
    run_deployed(project, nodes, state / "run")
    return asked


def test_a_node_killed_at_any_file_operation_answers_the_same_after_it(
    steady, tmp_path, monkeypatch
):
    folder, project = steady
    asked = requests_of(folder, project, tmp_path / "asked", ("prepare", "model"))
    assert len(asked) == 2
    state = tmp_path / "killed"
    for request in asked:
        for point in range(1, 100):
            count = [point]

            def dying(*arguments, real, count=count):
                count[0] -= 1
                if not count[0]:
                    raise Crash
                return real(*arguments)

            with monkeypatch.context() as patch:
                for operation in ("_os_write", "_os_fsync", "_os_replace"):
                    real = getattr(disk, operation)
                    patch.setattr(disk, operation, lambda *a, real=real: dying(*a, real=real))
                try:
                    own_files(folder, project, state).handlers[70](*request)
                except Crash:
                    continue
            break
        assert point > 3
        assert b'\\"failed\\": \\"\\"' in own_files(folder, project, state).handlers[70](*request)
    places = (state / "client-0", tmp_path / "asked" / "client-0")
    one, other = (next(place.rglob("model.safetensors")) for place in places)
    assert one.read_bytes() == other.read_bytes()


def test_a_node_that_is_gone_at_the_end_gets_the_model_by_the_same_command(
    steady, tmp_path, caplog
):
    folder, project = steady
    nodes = own_files(folder, project, tmp_path / "state", True)

    def leaving(phase, answer):
        if phase == "train" and (tmp_path / "run" / "rounds.jsonl").is_file():
            nodes.handlers.pop(73, None)
        return [answer]

    there = dict(nodes.handlers)
    with caplog.at_level("WARNING", logger="undrift"):
        run_deployed(project, Wire(nodes, leaving), tmp_path / "run")
    assert "not on these nodes yet: client 3 (west)" in caplog.text
    assert not list((tmp_path / "state" / "client-3").rglob("model.safetensors"))
    nodes.handlers.update(there)
    run_deployed(project, nodes, tmp_path / "run")
    assert list((tmp_path / "state" / "client-3").rglob("model.safetensors"))


def test_whose_sums_were_refused_takes_no_part_in_the_run(steady, tmp_path):
    folder, project = steady

    def lying(phase, answer):
        if phase != "sums" or answer.node != 71:
            return [answer]
        letter = words_of(answer.data, 10**7)
        return [answer._replace(data=pack(EMPTY, {**letter, "told": {}}))]

    nodes = own_files(folder, project, tmp_path / "state", True)
    history = run_deployed(project, Wire(nodes, lying), tmp_path / "run")
    members = json.loads((tmp_path / "run" / "members.json").read_text())
    assert set(members["sizes"]) == {"0", "2", "3"}
    assert [r["clients"] for r in history] == [[0, 2, 3]] * 2
    assert preparation(tmp_path / "run")["rows"] == sum(members["sizes"].values())


def test_too_few_silos_with_sums_are_an_error(steady, tmp_path):
    folder, project = steady

    def silent(phase, answer):
        return [] if phase == "sums" and answer.node != 71 else [answer]

    nodes = own_files(folder, project, tmp_path / "state", True)
    hasty = brief(project)
    hasty = dataclasses.replace(hasty, patience=hasty.patience._replace(seconds=1.0))
    with pytest.raises(FederationError, match="1 of 4 clients told of their tables"):
        run_deployed(hasty, Wire(nodes, silent), tmp_path / "run")
    assert not (tmp_path / "run" / "members.json").exists()

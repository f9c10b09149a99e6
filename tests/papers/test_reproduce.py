"""`undrift reproduce`: runs, goes on, and keeps full records apart from others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sources import people
from undrift.cli import main, parser
from undrift.experiment.batch import run_together
from undrift.experiment.family import paper_settings
from undrift.papers import running
from undrift.papers.records import counts, read_records
from undrift.papers.running import Options, reproduce
from undrift.sources.sent140 import CSV

from .small import small

__all__ = ["small"]
FAST = ["reproduce", "--jobs", "1", "--quiet"]


def cells(path: Path) -> dict[tuple[str, str], dict]:
    return {(e["setting"], e["method"]): e for e in read_records(path)["cells"]}


def test_a_table_becomes_records(small, capsys):
    assert main([*FAST, "small"]) == 0
    out = capsys.readouterr().out
    assert "small: 4 of 4 cells have a full record" in out
    found = json.loads((small / "reproductions/small.json").read_text())
    assert found["table"] == "small"
    assert [(e["setting"], e["name"]) for e in found["cells"]] == [
        ("small-slow", "FedAvg"), ("small-slow", "FedProx"),
        ("small-fast", "FedAvg"), ("small-fast", "FedProx"),
    ]  # fmt: skip
    one = found["cells"][0]
    assert one["kind"] == "full" and one["rounds"] == 4 and len(one["seeds"]) == 2
    assert one["paper"] == {"value": 50.0, "std": 1.0, "rounds_to": [1, ">4"]}
    assert one["difference"] == pytest.approx(one["ours"]["value"] - 50.0, abs=1e-3)
    assert one["ours"]["rounds_to"][0]["median"] == 1
    assert one["data"] == {"name": "synthetic", "form": "generated", "real": False}
    assert one["curve"]["rounds"] == [1, 2, 3, 4]
    assert one["versions"]["undrift"] and one["device"] and one["precision"] == "float32"
    assert one["seconds"] > 0 and sum(s["seconds"] for s in found["sessions"]) > 0


def test_what_is_complete_is_only_read(small, monkeypatch):
    main([*FAST, "small-slow"])
    before = (small / "reproductions/small.json").read_text()
    monkeypatch.setattr(running, "run_tasks", None)  # would fail if it were called
    assert main([*FAST, "small-slow"]) == 0
    assert (small / "reproductions/small.json").read_text() == before
    assert counts(small / "reproductions") == {"small": (2, 4)}


def test_shortened_runs_are_kept_apart_and_go_on(small, capsys):
    assert main([*FAST, "small-slow", "--rounds", "2"]) == 0
    assert main([*FAST, "small-slow", "--seeds", "1"]) == 0
    assert not (small / "reproductions/small.json").exists()
    short = cells(small / "reproductions/shortened/small.json")
    assert {e["kind"] for e in short.values()} == {"shortened"}
    assert main([*FAST, "small-slow"]) == 0
    full = cells(small / "reproductions/small.json")
    assert main([*FAST, "small-slow", "--rounds", "3"]) == 0
    assert cells(small / "reproductions/small.json") == full
    lines = (small / "runs/reproduce/small-slow/fedavg/seed-0-1-1/rounds.jsonl").read_text()
    assert [json.loads(line)["round"] for line in lines.splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("complete", [True, False])
def test_a_damaged_run_is_an_error_and_leaves_no_record_of_fewer_rounds(small, capsys, complete):
    assert main([*FAST, "small-slow"]) == 0
    place = small / "runs/reproduce/small-slow/fedavg/seed-0-0-0"
    whole, names = (place / "rounds.jsonl").read_bytes(), [p.name for p in place.parent.iterdir()]
    assert place.name in names, names
    (place / "rounds.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    if not complete:
        (place / "summary.json").unlink()
    for path in (small / "reproductions").rglob("*.json"):
        path.unlink()
    assert main([*FAST, "small-slow"]) == 2
    assert "has 2 sound rounds (it ends after line 2)" in capsys.readouterr().err
    records = list((small / "reproductions").rglob("small.json"))
    found = [one for path in records for one in read_records(path)["cells"]]
    assert all(len(one["seeds"]) == 1 for one in found if one["method"] == "fedavg"), found
    (place / "rounds.jsonl").write_bytes(whole)
    assert main([*FAST, "small-slow"]) == 0


def test_only_some_methods(small):
    assert main([*FAST, "small", "--only", "FedProx"]) == 0
    assert {m for _, m in cells(small / "reproductions/small.json")} == {"fedprox"}


def test_methods_with_a_number_in_their_name_can_be_chosen():
    from undrift.cli.reproduce import _options
    from undrift.papers import chosen_settings

    chosen = parser().parse_args(["reproduce", "--only", "d=1", "D=20", "algorithm.lr=0.1"])
    found = _options(chosen, chosen_settings(["fedvra-fig2-d"]))
    assert found.only == ("d=1", "D=20") and found.changes == ("algorithm.lr=0.1",)


def test_a_figures_own_name_means_no_other_that_begins_like_it():
    from undrift.papers import chosen_settings

    assert {s.family for s in chosen_settings(["fedrl-fig3"])} == {"fedrl-fig3"}
    assert [s.name for s in chosen_settings(["fedrl-fig3-cifar10"])] == [
        "fedrl-fig3-cifar10-medium"
    ]


def test_shortened_runs_of_other_lengths_stand_side_by_side(small):
    for options in (["--rounds", "1", "--seeds", "3"], ["--rounds", "3"], ["--rounds", "2"]):
        assert main([*FAST, "small-slow", "--only", "FedAvg", *options]) == 0
    kept = read_records(small / "reproductions/shortened/small.json")["cells"]
    assert sorted((e["rounds"], len(e["seeds"])) for e in kept) == [(1, 3), (2, 2), (3, 2)]


def test_another_reading_is_an_alternative(small):
    settings = ["--only", "fedprox", "--seeds", "2", "algorithm.mu=0.5"]  # after options, too
    assert main([*FAST, "small-slow", *settings]) == 0
    found = read_records(small / "reproductions/small.json")
    assert not found["cells"]
    (one,) = found["alternatives"]
    assert one["kind"] == "altered" and one["changes"] == ["algorithm.mu=0.5"]
    assert counts(small / "reproductions") == {"small": (0, 4)}


class Clock:
    """A second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now


def test_time_that_is_over_leaves_unfinished_records_and_goes_on(small, monkeypatch):
    settings = [paper_settings()["small-slow"]]
    place = (small / "runs", small / "records")
    with monkeypatch.context() as patch:
        patch.setattr(running, "time", Clock())
        reproduce(settings, Options(), *place, minutes=3.5 / 60, jobs=1)
    assert not cells(small / "records/small.json")
    assert not cells(
        small / "records/shortened/small.json"
    )  # nor has any method both of its seeds begun
    with monkeypatch.context() as patch:
        patch.setattr(running, "time", Clock())
        reproduce(settings, Options(), *place, minutes=5.5 / 60, jobs=1)
    (one,) = read_records(small / "records/shortened/small.json")["cells"]
    assert (one["kind"], one["method"], one["differs"]) == ("unfinished", "fedavg", None)
    assert one["rounds"] == 2
    made = reproduce(settings, Options(), *place, jobs=1).entries
    assert [e["kind"] for e in made] == ["full", "full"]
    assert not read_records(small / "records/shortened/small.json")["cells"]
    again = reproduce(settings, Options(), small / "other", small / "other-records", jobs=1)
    assert [e["ours"]["each"] for e in again.entries] == [e["ours"]["each"] for e in made]


def test_on_a_device_settings_of_one_kind_of_work_are_one_batch(small, monkeypatch):
    seen = []

    def noted(tasks, **settings):
        seen.append(len(tasks))
        return run_together(tasks, **settings)

    monkeypatch.setattr(running, "run_together", noted)
    monkeypatch.setattr(running, "device_named", lambda name: "cuda")
    assert main([*FAST, "small"]) == 0
    assert seen == [8]
    found = cells(small / "reproductions/small.json")
    assert {e["kind"] for e in found.values()} == {"full"} and len(found) == 4
    assert not list(small.rglob("checkpoint"))  # nobody goes on from a complete run


def test_fewer_seeds_do_not_replace_more(small, caplog):
    assert main([*FAST, "small-slow", "--seeds", "3"]) == 0
    assert main([*FAST, "small-slow", "--seeds", "2"]) == 0
    assert "small-slow FedAvg: not recorded, for there is a record of 3 seeds" in caplog.text
    assert {len(e["seeds"]) for e in cells(small / "reproductions/small.json").values()} == {3}


@pytest.mark.parametrize("place", ["small.json", "shortened/small.json"])
@pytest.mark.parametrize(
    "text",
    ["{}", "null", '{"cells": [1]}', '{"cells": [{', '{"cells": [{}]}',
     '{"cells": [{"setting": ["a"], "method": "b", "kind": "full", "rounds": 1, "seeds": []}]}',
     '{"cells": [], "sessions": [{"seconds": 1}]}'],
)  # fmt: skip
def test_a_broken_file_of_records_is_found_first_and_not_written_over(small, capsys, place, text):
    path = small / "reproductions" / place
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert main([*FAST, "small-slow"]) == 2
    assert "restore it, or move it away" in capsys.readouterr().err
    assert path.read_text() == text
    assert not (small / "runs").exists()


@pytest.mark.parametrize("option", ["--out", "--records"])
def test_a_folder_that_cannot_be_written_is_found_before_the_training(small, capsys, option):
    (small / "file").write_text("")
    assert main([*FAST, "small-slow", option, "file/below"]) == 2
    assert "a part of this path is a file" in capsys.readouterr().err.lower()
    assert not list(small.glob("runs/**/rounds.jsonl"))


@pytest.mark.parametrize(
    "text", ["{bad", "[]", '{"seconds": 3, "commits": [], "data": 1, "written": "x"}',
             '{"seconds": {"fedavg": "x"}, "commits": {"fedavg": 3}}'],
)  # fmt: skip
def test_damaged_notes_about_runs_are_begun_anew(small, text):
    assert main([*FAST, "small-slow", "--rounds", "2"]) == 0
    (small / "runs/reproduce/small-slow/about.json").write_text(text)
    assert main([*FAST, "small-slow"]) == 0
    one = cells(small / "reproductions/small.json")["small-slow", "fedavg"]
    assert one["data"]["name"] == "synthetic" and one["seconds"] >= 0 and one["commit"]


def test_a_record_names_the_commits_that_made_its_rounds(small, monkeypatch):
    monkeypatch.setenv("UNDRIFT_COMMIT", "first")
    assert main([*FAST, "small-slow", "--only", "fedavg"]) == 0
    assert main([*FAST, "small-fast", "--rounds", "2"]) == 0
    monkeypatch.setenv("UNDRIFT_COMMIT", "second")
    assert main([*FAST, "small"]) == 0
    found = cells(small / "reproductions/small.json")
    assert {key: (one["commit"], one.get("commits")) for key, one in found.items()} == {
        ("small-slow", "fedavg"): ("first", None),  # it was complete
        ("small-slow", "fedprox"): ("second", None),
        ("small-fast", "fedavg"): ("second", ["first", "second"]),
        ("small-fast", "fedprox"): ("second", ["first", "second"]),
    }


def test_runs_of_before_name_one_commit_for_all_methods(small, monkeypatch):
    monkeypatch.setenv("UNDRIFT_COMMIT", "second")
    assert main([*FAST, "small-slow", "--only", "fedavg"]) == 0
    about = small / "runs/reproduce/small-slow/about.json"
    old = {n: v for n, v in json.loads(about.read_text()).items() if n != "commits"}
    about.write_text(json.dumps({**old, "commit": "first"}))
    assert main([*FAST, "small-slow"]) == 0
    found = cells(small / "reproductions/small.json")
    assert [one["commit"] for one in found.values()] == ["first", "second"]


def test_what_is_complete_is_no_longer_unfinished(small, monkeypatch):
    settings, options = [paper_settings()["small-slow"]], Options(rounds=3)
    place = (small / "runs", small / "records")
    with monkeypatch.context() as patch:
        patch.setattr(running, "time", Clock())
        reproduce(settings, options, *place, minutes=6.5 / 60, jobs=1)
    shortened = small / "records/shortened/small.json"
    assert {one["kind"] for one in read_records(shortened)["cells"]} == {"unfinished"}
    reproduce(settings, options, *place, jobs=1)
    assert {one["kind"] for one in read_records(shortened)["cells"]} == {"shortened"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "reproduce needs a name"),
        (["smal"], "Did you mean 'small'"),
        (["small", "--minutes", "0"], "leaves no time"),
        (["small", "--precision", "fp8"], "no precision named 'fp8'"),
        (["small", "--seeds", "0"], "--seeds"),
        (["small", "--jobs", "0"], "--jobs 0"),
        (["small", "--device", "tpu"], "no device 'tpu'"),
        (["small", "algorithm.lr=0.1,0.2"], "not a sweep"),
        (["small", "rounds=3"], "set by options"),
    ],
)
def test_what_cannot_be_is_refused(small, capsys, arguments, says):
    assert main([*FAST, *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (small / "reproductions").exists()


def test_a_setting_that_fails_stops_no_other_and_is_told_at_the_end(small, capsys):
    crowded = """
[part.crowded]
title = "crowded"
partition = { use = "iid", clients = 1000 }

[[setting]]
parts = ["crowded"]
cells = { fedavg = [50.0, 1.0, 1, ">4"], fedprox = [60.0, 1.0, 2, ">4"] }
"""
    file = small / "papers/small.toml"
    file.write_text(file.read_text() + crowded)
    assert main([*FAST, "small", "--only", "FedAvg"]) == 2  # though all three are one group
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("undrift: small-crowded failed: 2 of 6 runs")
    assert "108 examples cannot give 1000 clients one each" in shown.err
    assert "small: 2 of 6 cells have a full record" in shown.out
    assert {s for s, _ in cells(small / "reproductions/small.json")} == {"small-slow", "small-fast"}


def test_settings_without_data_are_left_out_and_told(small, capsys, monkeypatch):
    absent = """
[part.absent]
title = "absent"
data = { use = "mnist" }
partition = { use = "iid", clients = 6 }

[[setting]]
parts = ["absent"]
cells = { fedavg = [50.0, 1.0, 1, ">4"], fedprox = [60.0, 1.0, 2, ">4"] }
"""
    file = small / "papers/small.toml"
    file.write_text(file.read_text() + absent)
    monkeypatch.setenv("UNDRIFT_DATA", str(small / "no-data"))
    assert main([*FAST, "small", "--only", "FedAvg"]) == 1  # the rest of it was done
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("undrift: small-absent left out: ") and "data get mnist" in last


def test_the_list_counts_full_records(small, capsys):
    main([*FAST, "small-slow", "--only", "fedavg"])
    capsys.readouterr()
    assert main(["reproduce", "--list"]) == 0
    assert "1 of 4 cells in 2 settings" in capsys.readouterr().out
    path = small / "reproductions/small.json"
    found = json.loads(path.read_text())
    stray = [{**found["cells"][0], "method": "fedprox", "kind": kind} for kind in ("tiny", None)]
    path.write_text(json.dumps({**found, "cells": [*found["cells"], *stray]}))
    assert main(["reproduce", "small", "--list"]) == 0
    assert "small-slow: 1 of 2 cells" in capsys.readouterr().out
    assert counts(small / "reproductions") == {"small": (1, 4)}


# ------------------------------------------------------------------------------------------ tiny
def tiny(name: str, folder: Path, monkeypatch, *more: str) -> dict:
    monkeypatch.setenv("UNDRIFT_DATA", str(folder / "no-data"))
    monkeypatch.chdir(folder)
    assert main(["reproduce", name, "--tiny", "--quiet", "--device", "cpu", *more]) == 0
    return cells(folder / f"runs/reproduce-tiny/shortened/{paper_settings()[name].family}.json")


def test_a_tiny_run_needs_no_data(tmp_path, monkeypatch):
    found = tiny("adabest-table2-emnist-1pc-iid", tmp_path, monkeypatch, "--only", "AdaBest")
    (one,) = found.values()
    assert one["kind"] == "tiny" and one["rounds"] == 2 and set(one["others"]) == {"all"}
    assert one["data"] == {"name": "emnist", "form": "random stand-in", "real": False}


def test_without_data_the_next_move_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path / "no-data"))
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "fedvra-table4", "--device", "cpu", "--quiet"]) == 2
    assert "undrift data get mnist" in capsys.readouterr().err


def test_without_word_vectors_they_are_named(tmp_path, monkeypatch, capsys):
    people.tweet_csv(tmp_path / "data/sent140" / CSV, {f"user{k}": 4 for k in range(24)})
    monkeypatch.setenv("UNDRIFT_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    for name in ("rfedavg-table1-sent140-noniid", "rfedavg-table2-sent140-iid"):
        assert main(["reproduce", name, "data.verify=false", "--device", "cpu", "--quiet"]) == 2
        assert "nlp.stanford.edu/projects/glove" in capsys.readouterr().err

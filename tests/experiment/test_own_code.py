"""Own parts: where they are found, who else sees them, and that reading never runs them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from undrift import own
from undrift.cli import main
from undrift.errors import ConfigError
from undrift.experiment import Experiment
from undrift.experiment.folder import open_run
from undrift.experiment.pool import run_all
from undrift.experiment.spec import load
from undrift.experiment.tables import write_table
from undrift.safe_path import shared_path

from .tiny import TABLE

ROOT = Path(__file__).parent.parent.parent
SHADOWS = ("statistics", "matplotlib", "torch", "random", "json", "numpy", "safetensors", "csv",
           "tomllib", "pyarrow", "PIL", "logging", "yaml", "triton", "ray", "flwr")  # fmt: skip

PARTS = """\
with open({mark!r}, "a") as file:
    file.write("imported")

import random, json, statistics
import torch
import undrift as fl
from undrift.models import build
from undrift.sources import synthetic as _synthetic
from helper import factor
from kit.inner import twice


@fl.record
class Shrink(fl.Rule):
    strength: float = fl.number(default=0.001, low=0)

    def after_step(self, w, view):
        return w * (1 - twice(factor) * self.strength)


@fl.record
class Halves:
    def split(self, labels, seed, keys=None):
        places = torch.arange(len(labels)).numpy()
        return [places[::2], places[1::2]]


def method(lr=0.1):
    return fl.fedavg(lr=lr)


def net(inputs, classes):
    import late  # found when it is called, too
    return build("mlp", 0, inputs=inputs, classes=classes, hidden=late.WIDTH)


def cost(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="none")
"""
OWN = {
    "model": {"use": "my_parts:net"},
    "task": {"loss": "my_parts:cost"},
    "partition": {"use": "my_parts:Halves"},
    "sampler": {"use": "everyone"},
    "algorithm": {"rules": [{"use": "my_parts:Shrink", "strength": 0.01}]},
}


def own_parts(folder: Path, mark: Path) -> None:
    """Write modules that need each other, and say when they are imported."""
    (folder / "kit").mkdir(parents=True)
    (folder / "my_parts.py").write_text(PARTS.format(mark=str(mark)))
    (folder / "helper.py").write_text("factor = 0.5\n")
    (folder / "late.py").write_text("WIDTH = 4\n")
    (folder / "kit" / "__init__.py").write_text("from . import inner\n")
    (folder / "kit" / "inner.py").write_text("from .deep import two\ntwice = lambda x: two * x\n")
    (folder / "kit" / "deep.py").write_text("two = 2.0\n")


def shadows(folder: Path, mark: Path) -> None:
    """Lay files beside them that stand for modules of the library as soon as they can."""
    for name in SHADOWS:
        says = f"with open({str(mark)!r}, 'a') as file:\n    file.write({name!r})\n"
        (folder / f"{name}.py").write_text(f"{says}raise RuntimeError({name!r})\n")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with an experiment of own parts and with shadows; it is the current one."""
    folder = tmp_path / "work"
    own_parts(folder, tmp_path / "imported")
    shadows(folder, tmp_path / "shadowed")
    (folder / "mine.toml").write_text(write_table({**TABLE, **OWN, "rounds": 1}))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def undrift(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does: by `python -m`, which puts the current folder first."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", **more}
    return subprocess.run(
        [sys.executable, "-m", "undrift", *words],
        cwd=cwd, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


# ---------------------------------------------------------------------------- nothing is shadowed
def test_files_in_the_current_folder_stand_for_no_module(here: Path) -> None:
    """A run in two workers, and a report, with own modules of every kind among shadows."""
    done = undrift("compare", "mine.toml", "seed=0,1", "--jobs", "2", "--quiet", cwd=here)
    assert done.returncode == 0, done.stderr
    assert not (here.parent / "shadowed").exists()
    done = undrift("report", "runs/tiny", cwd=here)
    assert done.returncode == 0, done.stderr
    assert not (here.parent / "shadowed").exists()
    assert (here.parent / "imported").read_text() == "imported" * 3  # by compare and its workers


def test_a_program_that_imports_undrift_keeps_its_path(here: Path) -> None:
    (here / "prog").mkdir()
    (here / "prog" / "__init__.py").write_text("import undrift\n")
    (here / "prog" / "__main__.py").write_text("import helper\nprint(helper.factor)\n")
    for name in SHADOWS:
        (here / f"{name}.py").unlink()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "prog"], cwd=here, capture_output=True, text=True, check=False,
        env={k: v for k, v in environment.items() if k != "PYTHONSAFEPATH"},
    )  # fmt: skip
    assert done.stdout == "0.5\n", done.stderr


def test_workers_get_the_path_without_folders_of_programs(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    path = shared_path()
    assert "" not in path and str(tmp_path) not in path and str(ROOT / "src") in path


def test_own_modules_are_seen_by_their_folder_alone(here: Path) -> None:
    (made,) = load(here / "mine.toml")
    kind = type(made.algorithm.rules[0])
    assert own.plain_module(kind.__module__) == "my_parts"
    assert not {"my_parts", "helper", "kit"} & set(sys.modules)
    assert str(here) not in sys.path and "" not in sys.path
    again = pickle.loads(pickle.dumps(made.algorithm))
    assert again == made.algorithm
    assert Experiment.from_toml(made.to_toml(), trust=True) == made


def test_two_folders_may_have_modules_of_one_name(tmp_path: Path) -> None:
    for name, width in (("a", 3), ("b", 5)):
        own_parts(tmp_path / name, tmp_path / "imported")
        (tmp_path / name / "late.py").write_text(f"WIDTH = {width}\n")
        (tmp_path / name / "mine.toml").write_text(write_table({**TABLE, **OWN, "rounds": 1}))
    both = [load(tmp_path / name / "mine.toml")[0] for name in "ab"]
    from undrift.experiment.world import build

    for _ in range(2):
        widths = [next(build(one).trainer.task.module.parameters()).shape[0] for one in both]
        assert widths == [3, 5]
    histories = run_all(
        [both[0], load(tmp_path / "b/mine.toml", ["label=b"])[0]], tmp_path / "out", jobs=2
    )
    alone = run_all([both[1]], tmp_path / "alone", jobs=1)
    assert histories[1]["train_loss"] == alone[0]["train_loss"]


def test_a_run_knows_where_its_parts_were(here: Path, monkeypatch: Any, capsys: Any) -> None:
    assert main(["run", "mine.toml", "--quiet", "--jobs", "1"]) == 0
    monkeypatch.chdir(here.parent)
    assert main(["evaluate", "work/runs/tiny/sentence/seed-0", "--trust"]) == 0
    assert "after round 1" in capsys.readouterr().out


def test_what_is_installed_comes_first_and_a_missing_neighbour_is_named(here: Path) -> None:
    (here / "broken.py").write_text("import nowhere_to_be_found\n")
    (here / "statistics.py").write_text("def mine(): ...\n")
    with own.scope(here):
        assert own.imported("statistics:mean").__module__ == "statistics"
        assert own.imported("statistics:mine").__module__.endswith(".statistics")
        with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
            own.imported("broken:thing")
        with pytest.raises(AttributeError, match=r"module 'helper' has no attribute 'thing'"):
            own.imported("helper:thing")


# ------------------------------------------------------------------------ reading imports nothing
STRANGERS: dict[str, Any] = {
    "model": "evil:thing",
    "task": {"loss": "evil:thing"},
    "data": {"use": "evil:thing"},
    "partition": {"use": "evil:thing"},
    "sampler": {"use": "evil:thing"},
    "algorithm": {"rules": [{"use": "evil:thing"}]},
}


def test_a_cluster_that_a_folder_names_is_not_joined(sent: Path, capsys: Any) -> None:
    table = open_run(sent).table() or {}
    table["engine"] = {"use": "ray", "address": "127.0.0.1:1"}
    (sent / "experiment.toml").write_text(write_table(table))
    assert main(["evaluate", str(sent)]) == 2
    assert "engine.address = 127.0.0.1:1" in capsys.readouterr().err
    assert main(["report", str(sent.parent.parent)]) == 0


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that somebody sent; one of its sections names code, which lies at hand."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", _file(tmp_path, TABLE), "--out", "sent", "--quiet", "--jobs", "1"]) == 0
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').write_text('evil')\n")
    (found,) = (tmp_path / "sent").rglob("experiment.toml")
    (found.parent / "evil.py").write_text(
        "import pathlib\npathlib.Path('ran').write_text('evil')\n"
    )
    return found.parent


def _file(folder: Path, table: dict[str, Any]) -> str:
    (folder / "tiny.toml").write_text(write_table({**table, "rounds": 1}))
    return str(folder / "tiny.toml")


@pytest.mark.parametrize("section", list(STRANGERS))
def test_no_way_of_reading_runs_code(sent: Path, section: str, capsys: Any) -> None:
    table = {**(open_run(sent).table() or {}), section: STRANGERS[section]}
    (sent / "experiment.toml").write_text(write_table(table))
    here, out = Path.cwd(), str(sent.parent.parent)
    for words in (["show", str(sent)], ["show", str(sent / "experiment.toml")], ["report", out]):
        assert main(words) == 0, words
    for words in (["evaluate", str(sent)], ["run", str(sent)], ["compare", str(sent)],
                  ["partition", str(sent)]):  # fmt: skip
        assert main(words) == 2
        assert "'evil:thing': code that is not part of undrift" in capsys.readouterr().err
    for read in (Experiment.from_table, load):
        with pytest.raises(ConfigError, match="say --trust"):
            read(table)
    with pytest.raises(ConfigError, match="say --trust"):
        Experiment.from_toml(write_table(table))
    assert not (here / "ran").exists()
    main(["evaluate", str(sent), "--trust"])
    assert (here / "ran").read_text() == "evil"


def test_what_is_loaded_already_is_no_part_of_the_package_either(sent: Path) -> None:
    """`os:system` is imported long ago: what matters is that it would be called."""
    table = {**(open_run(sent).table() or {}), "partition": {"use": "os:mkdir", "path": "made"}}
    for name in ("partition", "sampler"):
        wrong = {**table, name: {"use": "os:mkdir", "path": "made"}}
        with pytest.raises(ConfigError, match="os:mkdir"):
            Experiment.from_table(wrong)
    assert not Path("made").exists()


def test_the_few_examples_of_a_tiny_table_are_no_code_of_others() -> None:
    """`reproduce --tiny` writes them into its runs; no other function of the package has a name."""
    few = {"use": "undrift.papers.stand_in:few", "of": "mnist", "examples": 120}
    made = Experiment.from_table({**TABLE, "data": few, "partition": {"use": "iid", "clients": 6}})
    assert made.to_table()["data"] == few
    with pytest.raises(ConfigError, match="code that is not part of undrift"):
        Experiment.from_table({**TABLE, "data": {"use": "undrift.sources.ways:run"}})


def test_a_name_on_the_command_line_is_the_callers_own(here: Path) -> None:
    changes = ["model.use=my_parts:net", "rounds=1"]
    assert load(TABLE, changes)[0].model == load(TABLE, changes, trust=True)[0].model
    with pytest.raises(ConfigError, match="my_parts:cost"):
        load({**TABLE, "task": OWN["task"]}, changes)


def test_a_terminal_gets_no_control_characters_of_a_folder(sent: Path, capsys: Any) -> None:
    lines = (sent / "rounds.jsonl").read_text().replace("test_accuracy", "test\\u001b[31m_x")
    (sent / "rounds.jsonl").write_text(lines.replace("test_loss", "test_\\u0007accuracy"))
    for words in (["show", str(sent)], ["report", str(sent.parent.parent)],
                  ["report", str(sent.parent.parent), "--metric", "test\x1b[31m_x"]):  # fmt: skip
        main(words)
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and "\x07" not in said.out + said.err

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from undrift import Seeds, Work, catalogue, scaffold
from undrift.data.partitions import PARTITIONS, DirichletClient
from undrift.errors import ConfigError
from undrift.experiment import names
from undrift.experiment.sections import Choice
from undrift.experiment.shipped import shipped_experiments
from undrift.experiment.spec import Experiment, load
from undrift.experiment.sweep import expand
from undrift.experiment.tables import write_table

from .tiny import TABLE, tiny


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_algorithm_is_a_file_and_back(name: str) -> None:
    made = tiny(f"algorithm.use={name}")
    assert made.algorithm == catalogue()[name].build(lr=0.1)
    assert Experiment.from_toml(made.to_toml()) == made


@pytest.mark.parametrize("name", list(shipped_experiments()))
def test_every_shipped_experiment_is_a_file_and_back(name: str) -> None:
    for made in load(name):
        assert Experiment.from_toml(made.to_toml()) == made


@pytest.mark.parametrize(
    "change",
    [
        "work={epochs={low=1, high=5}, batch='all'}",
        "work={steps=3, batch=4, last='bootstrap'}",
        "sampler={use='explicit', rounds=[[0, 1], [2], [3], [4, 5]]}",
        "sampler={use='weighted', count=2, by=[1.0, 2.0, 3.0]}",
        "seed={partition=1, model=2, run=3}",
        "arrival={rounds=3, first=0.5}",
        "partition={use='similarity', clients=4, s=0.5}",
        "algorithm={rules=[{use='Prox', mu=0.1}, {use='Scaffold'}], server={use='Adaptive'}}",
        "algorithm={use='fedavg', local={use='HeavyBall', lr=0.1,"
        " schedule={use='Milestones', starts=[2, 3], factors=[0.1, 0.01]}}}",
        "data={use='table', path='x.csv', target='y', features=['a', 'b']}",
        "evaluate={models=['avg', 'all'], drift=true, target=0.5}",
        "task={loss='package.module:function', flip=0.5}",
    ],
)
def test_unusual_settings_are_a_file_and_back(change: str) -> None:
    made = tiny(change)
    assert Experiment.from_toml(made.to_toml(), trust=True) == made


def test_the_same_in_python() -> None:
    partition = DirichletClient(10, alpha=0.1)
    mine = Experiment("digits", "mlp", scaffold(lr=0.1), partition, work=Work(epochs=2), rounds=3)
    text = """
        rounds = 3
        label = "run"
        data = "digits"
        model = "mlp"
        algorithm = { use = "scaffold", lr = 0.1 }
        partition = { use = "dirichlet_client", clients = 10, alpha = 0.1 }
        work = { epochs = 2 }
    """
    assert Experiment.from_toml(text) == mine
    assert replace(mine, seed=Seeds(1, 2, 3)).seeds == Seeds(1, 2, 3)


def test_every_setting_that_takes_a_list_is_known() -> None:
    found = {
        f"{section}.{name}.{setting}"
        for section, known in names.sections().items()
        for name, function in known.items()
        for setting in names.parameters(function)
        if names.list_depth(function, setting)
    }
    assert {"model.mlp.hidden", "data.synthetic.sizes", "sampler.explicit.rounds"} <= found
    assert not any(name.endswith((".lr", ".clients", ".alpha")) for name in found)


# --------------------------------------------------------------------------------------- sweeps
def test_lists_make_a_sweep_seeds_included() -> None:
    made = load(TABLE, ["algorithm.use=fedavg,scaffold", "algorithm.lr=0.1,0.2", "seed=0,1"])
    labels = ["fedavg lr=0.1", "fedavg lr=0.2", "scaffold lr=0.1", "scaffold lr=0.2"]
    assert sorted({e.label for e in made}) == labels
    assert len(made) == 8


def test_an_array_of_algorithms_is_a_sweep_with_settings_of_its_own() -> None:
    algorithms = [{"use": "fedavg"}, {"use": "fedadam", "server_lr": [0.1, 0.2]}]
    labels = [v.label for v in expand({**TABLE, "algorithm": algorithms})]
    assert labels == ["fedavg", "fedadam server_lr=0.1", "fedadam server_lr=0.2"]


def test_a_list_that_is_a_value_is_none() -> None:
    assert len(load(TABLE, ["model.hidden=[8, 8]"])) == 1
    assert len(load(TABLE, ["model.hidden=[[8, 8], [4]]"])) == 2


def test_labels_of_one_algorithm_twice_must_be_given() -> None:
    twice = [{"use": "fedavg", "lr": 0.1}, {"use": "fedavg", "lr": 0.2}]
    with pytest.raises(ConfigError, match=r"give each .* a `label`"):
        load({**TABLE, "algorithm": twice})
    named = [{**one, "label": f"lr {one['lr']}"} for one in twice]
    assert [e.label for e in load({**TABLE, "algorithm": named})] == ["lr 0.1", "lr 0.2"]


# ------------------------------------------------------------------------------------ refusals
BAD = {
    "algorithm.use=fedavgg": "Did you mean 'fedavg'?",
    "algorithm.use=3": "must be a name",
    "algorithm.lr=-1": "Sgd.lr = -1.0 is outside",
    "algorithm.lr=fast": "must be a number",
    "algorithm.lrr=0.1": "Did you mean 'lr'?",
    "algorithm.local={use='HeavyBal'}": "Did you mean 'HeavyBall'?",
    "algorithm={rules=[{mu=0.1}]}": "needs `use`",
    "algorithm={rule=3}": "Did you mean 'rules'?",
    "algorithm={use='fednova', local={use='RmsProp'}}": "does not have",
    "algorithm={use='no.such.module:thing'}": "cannot import",
    "algorithm={use='json:nothing'}": "cannot import",
    "algorithm={use='json:dumps', obj=3}": "not an Algorithm",
    "algorithm=[]": "leaves nothing to run",
    "rounds=0": "rounds must be a whole number, 1 or more",
    "rounds=2.5": "whole number",
    "rounds=true": "whole number",
    "seed=-1": "whole number",
    "seed=x": "whole number",
    "seed={run=3}": "all of partition, model and run",
    "seed=99999999999999999999": "63 bits",
    "seed=1,1": "there twice",
    "name=../up": "cannot name a folder",
    "name=''": "cannot name a folder",
    "label=/root": "cannot name a folder",
    "label=..": "cannot name a folder",
    "wrk.steps=3": "Did you mean 'work'?",
    "work.step=3": "Did you mean 'steps'?",
    "work.batch=0": "whole number",
    "work.epochs=3": "give one of them",
    "work.last=kep": "Did you mean 'keep'?",
    "work={epochs={low=1}}": "`low` and `high`",
    "work={epochs={low=5, high=1}}": "epochs",
    "work=3": "must be a table",
    "sampler.use=unifrm": "Did you mean 'uniform'?",
    "sampler.count=ten": "whole number",
    "sampler={count=3}": "needs `use`",
    "sampler={use='uniform'}": "either a count or a fraction",
    "sampler={use='bernoulli', fraction=1.5}": "outside",
    "partition={use='dirichlet_clint', clients=3, alpha=1}": "Did you mean 'dirichlet_client'?",
    "partition={use='dirichlet_client', clients=3, alpha=-1}": "outside",
    "partition={use='dirichlet_client', clients=3}": "needs the setting 'alpha'",
    "model={hidden=3}": "needs `use`",
    "model=3": "must be a name or a table",
    "data=3": "must be a name or a table",
    "task.loss=hinge": "no loss named 'hinge'",
    "task.dtype=float16": "no choice named 'float16'",
    "task.flip=2": "[0, 1]",
    "task.target=x": "no choice named 'x'",
    "evaluate.every=0": "whole number",
    "evaluate.models=clod": "Did you mean 'cloud'?",
    "evaluate.models=[]": "name each model once",
    "evaluate.per_class=1": "true or false",
    "evaluate.target=high": "must be a number",
    "hold.client_test=1.0": "[0, 1)",
    "hold.validation_clients=-0.1": "[0, 1)",
    "engine.use=spark": "no choice named 'spark'",
    "engine.chunk=0": "whole number",
    "engine={use='reference', chunk=3}": "belong to",
    "arrival={rounds=0}": "whole number",
    "arrival={}": "needs the setting 'rounds'",
}


@pytest.mark.parametrize("change", list(BAD))
def test_bad_settings_are_refused_when_the_experiment_is_made(change: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(BAD[change])):
        load(TABLE, [change])


def test_missing_sections_are_named() -> None:
    for name in ("data", "model", "algorithm"):
        with pytest.raises(ConfigError, match=rf"no \[{name}\]"):
            load({k: v for k, v in TABLE.items() if k != name})


def test_an_experiment_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'digits'"):
        load("digit")


def test_own_objects_are_sent_to_the_trainer() -> None:
    with pytest.raises(ConfigError, match="go to a Trainer"):
        Experiment("digits", object(), scaffold())  # type: ignore[arg-type]


def test_a_sweep_without_end_is_refused() -> None:
    many = list(range(200))
    with pytest.raises(ConfigError, match="more than 10000 combinations"):
        load({**TABLE, "seed": many, "rounds": [r + 1 for r in many]})


def test_names_of_partitions_are_found_in_any_spelling() -> None:
    kind = names.find(PARTITIONS, "DirichletClient", "partition", "")
    assert kind is DirichletClient


def test_labels_of_own_names_and_paths_can_name_folders() -> None:
    made = load(TABLE, ["data={use='table', target='y', path=['./a/x.csv', './a/z.csv']}"])
    assert [e.label for e in made] == ["fedavg path=x", "fedavg path=z"]
    made = load(TABLE, ["model={use=['my_parts:one', 'my_parts:two']}"])
    assert [e.label for e in made] == ["fedavg model=one", "fedavg model=two"]


def test_partitions_can_be_varied_alone() -> None:
    seeds = [{"partition": p, "model": 0, "run": 0} for p in range(3)]
    made = load({**TABLE, "seed": seeds})
    assert len({e.folder for e in made}) == len({e.seed_number for e in made}) == 3


def test_paths_start_from_the_file_that_names_them(tmp_path: Path) -> None:
    table = {**TABLE, "data": {"use": "table", "path": "x.csv", "target": "y"}}
    (tmp_path / "e.toml").write_text(write_table(table))
    (made,) = load(tmp_path / "e.toml")
    assert isinstance(made.data, Choice)
    assert made.data["path"] == str(tmp_path / "x.csv")

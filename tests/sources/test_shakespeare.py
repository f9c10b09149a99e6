"""Shakespeare by speaker, from a plain text and from LEAF's json; texts in a federation."""

import lzma

import numpy as np
import pytest
import torch
from torch import nn

import undrift as fl
from undrift import sources
from undrift.data import ByKey, DirichletClient
from undrift.errors import ConfigError, DataError
from undrift.experiment.run import run
from undrift.experiment.spec import load as experiments
from undrift.sources.shakespeare import ALPHABET

from . import people

LINES = {
    "First Citizen": "Before we proceed any further, hear me speak.\nYou know $ 3 things: hear!",
    "MENENIUS": "What work's, my countrymen, in hand? where go you?\n",
    "All": "Speak.",
}


def said(name, times):
    """What a speaker says in all."""
    return "\n".join([LINES[name].strip("\n")] * times)


def play(times=6):
    speeches = [f"{name}:\n{text.strip()}" for _ in range(times) for name, text in LINES.items()]
    return "\n\n".join(speeches) + "\n"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "shakespeare.txt").write_text(play())
    return tmp_path


def load(folder, **settings):
    return sources.load("shakespeare", directory=folder, **{"min_examples": 100, **settings})


def spelled(row):
    return "".join(ALPHABET[k] for k in row.tolist())


def test_the_alphabet_is_leafs():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert ALPHABET[0] == "\n" and ALPHABET[1] == " " and ALPHABET[-1] == "}"
    assert ALPHABET.index("A") == 25 and ALPHABET.index("a") == 53


def test_windows_of_a_speaker_and_the_next_character(text):
    made = load(text, test_share=0)
    assert made.info.client_names == ("First Citizen", "MENENIUS") and made.classes == 80
    assert made.train_x.dtype == torch.int64 and made.train_x.shape[1] == 80
    whole = said("First Citizen", 6).replace("$", " ")  # not in the alphabet
    own = made.train_clients == 0
    assert int(own.sum()) == len(whole) - 80
    for k, (row, y) in enumerate(zip(made.train_x[own], made.train_y[own], strict=True)):
        assert spelled(row) == whole[k : k + 80] and ALPHABET[y] == whole[k + 80]


def test_the_split_is_in_time_and_shares_no_character(text):
    made = load(text, test_share=0.25)
    for client, name in enumerate(made.info.client_names):
        whole = said(name, 6).replace("$", " ")
        train = made.train_x[made.train_clients == client]
        test = made.test_x[made.test_clients == client]
        usable = len(whole) - 80 - 80
        assert len(test) == usable // 4 and len(train) == usable - usable // 4
        assert spelled(train[0]) == whole[:80]
        # the last trained character comes right before the first tested one
        first = len(train) + 80
        assert spelled(test[0]) == whole[first : first + 80]
        assert spelled(test[-1]) == whole[-81:-1]


def test_speakers_with_few_examples_are_left_out(text):
    assert load(text, min_examples=300).info.client_names == ("First Citizen",)
    with pytest.raises(DataError, match=r"nobody in .*shakespeare.txt has 9999 examples"):
        load(text, min_examples=9999)
    few = load(text, min_examples=1, length=20)
    assert few.info.client_names == ("All", "First Citizen", "MENENIUS")
    assert few.train_x.shape[1] == 20
    assert len(load(text, speakers=1).info.client_names) == 1


def test_a_stride_thins_the_windows_out(text):
    every, some = load(text), load(text, stride=7)
    for client in (0, 1):
        mine = every.train_x[every.train_clients == client][::7]
        assert torch.equal(some.train_x[some.train_clients == client], mine)


@pytest.mark.parametrize("place", ["shakespeare/tiny.txt.xz", "shakespeare_tiny.txt.xz"])
def test_a_packed_text_is_read_in_place(place, text, tmp_path):
    path = tmp_path / "packed" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(lzma.compress(play().replace("\n", "\r\n").encode()))
    made = load(tmp_path / "packed")
    assert torch.equal(made.train_x, load(text).train_x) and made.info.path == path


def test_leafs_files_give_the_same(text, tmp_path):
    speakers = {n: people.windows(said(n, 6)) for n in ("First Citizen", "MENENIUS")}
    people.leaf(tmp_path / "l/shakespeare/all_data/all_data.json", speakers)
    made, same = load(tmp_path / "l", stride=2), load(text, stride=2)
    for name in ("train_x", "train_y", "test_x", "test_y", "train_clients", "test_clients"):
        assert torch.equal(getattr(made, name), getattr(same, name))


def test_leafs_split_is_kept(tmp_path):
    x, y = people.windows(said("First Citizen", 6))
    for side, rows in {"train": slice(0, 200), "test": slice(300, 350)}.items():
        people.leaf(tmp_path / f"shakespeare/{side}/a.json", {"ann": (x[rows], y[rows])})
    made = load(tmp_path)
    assert (
        len(made.train_x) == 200
        and len(made.test_x) == 50
        and spelled(made.test_x[0]) == (x[300].replace("$", " "))
    )


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (["short"], ["a"], "texts of 80 characters"),
        (["a" * 80], ["ab"], "single characters"),
        ([3], ["a"], "texts of 80"),
    ],
)
def test_broken_json_files_are_named(x, y, message, tmp_path):
    people.leaf(tmp_path / "shakespeare/a.json", {"ann": (x, y)})
    with pytest.raises(DataError, match=rf"a.json, user 'ann': .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"nobody speaks here\n", "no speech begins with a line `NAME:`"),
        ("a.txt", b"ANN:\n\xff\xfe\n", "cannot be read"),
        ("a.txt.xz", lzma.compress(play().encode())[:-9], "cannot be read"),
    ],
)
def test_broken_texts_are_named(name, data, message, tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        load(tmp_path)


def test_missing_files_and_mistakes_are_named(tmp_path):
    with pytest.raises(DataError, match=r"shakespeare is not in .*LEAF.*NAME:.*shakespeare/\*.txt"):
        load(tmp_path)
    for settings in ({"stride": 0}, {"length": 0}, {"speakers": 0}):
        with pytest.raises(ConfigError, match="must be at least 1"):
            load(tmp_path, **settings)


# ---- texts in a federation -----------------------------------------------------------------------
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(80, 4), nn.Linear(4, 80)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def test_a_federation_of_texts_trains_alike_in_both_engines(text):
    data = load(text)
    parts = ByKey().split(data.train_y.numpy(), seed=0, keys=data.train_clients.numpy())
    federation = fl.Federation.split(data.train_x, data.train_y, parts)
    models = []
    for engine in ("reference", "vectorised"):
        task = fl.Task.build(Reader, 0, dtype=torch.float64)
        trainer = fl.Trainer(task, federation, fl.scaffold(0.5), seed=0, engine=engine)
        assert trainer.federation.x.dtype == torch.int64
        before = trainer.evaluate(data.test_x, data.test_y)["loss"]
        trainer.run(2)
        assert trainer.evaluate(data.test_x, data.test_y)["loss"] < before
        models.append(trainer.server.w)
    assert torch.allclose(*models, atol=1e-12)
    dealt = DirichletClient(clients=3, alpha=1.0).split(data.train_y.numpy(), seed=0)
    assert np.concatenate(dealt).max() < len(data.train_y)


def test_an_experiment_names_the_source(text, monkeypatch):
    monkeypatch.setenv("UNDRIFT_DATA", str(text))
    table = {
        "rounds": 1,
        "data": {"use": "shakespeare", "min_examples": 100, "stride": 4},
        "model": {"use": "tests.sources.test_shakespeare:Reader"},
        "algorithm": {"use": "fedavg"},
        "engine": {"device": "cpu"},
        "evaluate": {"clients": True},
    }
    (made,) = experiments(table, trust=True)
    history = run(made)
    assert len(history) == 1 and 0 <= history.last("test_accuracy") <= 1

"""Sent140 by user, from the official csv and LEAF's json, and GloVe's word vectors."""

from contextlib import suppress

import pytest
import torch

from undrift import sources
from undrift.errors import ConfigError, DataError
from undrift.sources.glove import read_glove
from undrift.sources.sent140 import CSV, ZIP
from undrift.sources.words import tokens

from . import people, small

COUNTS = {"ann": 12, "bob": 30, "cy": 3, "dee": 20, "eve": 1}


@pytest.fixture
def official(tmp_path):
    people.tweet_csv(tmp_path / "sent140" / CSV, COUNTS)
    return tmp_path


def load(folder, **settings):
    return sources.load("sent140", directory=folder, **{"verify": False, **settings})


def test_the_users_with_most_tweets_split_per_user(official):
    made = load(official, users=3)
    assert made.info.client_names == ("ann", "bob", "dee") and made.info.form == "csv"
    assert torch.bincount(made.train_clients).tolist() == [11, 27, 18]
    assert torch.bincount(made.test_clients).tolist() == [1, 3, 2]
    assert made.train_x.dtype == torch.int64 and made.train_x.shape == (56, 25)
    assert made.classes == 2 and set(made.train_y.tolist()) == {0, 1}


def test_tweets_become_numbers_of_words(official):
    made = load(official, users=3, test_share=0)
    names = made.info.vocabulary
    assert names[:2] == ("<padding>", "<unknown>") and names[2] == "!"  # in every tweet
    texts = [text for n, c in COUNTS.items() for text, _ in people.tweets(c, [*COUNTS].index(n))
             if n in ("ann", "bob", "dee")]  # fmt: skip
    for row, text in zip(made.train_x.tolist(), texts, strict=True):
        words = tokens(text)
        assert [names[k] for k in row[: len(words)]] == words and not any(row[len(words) :])


def test_labels_go_with_their_words(official):
    made = load(official, users=5)
    good = {made.info.vocabulary.index(w) for w in people.GOOD.split()}
    for x, y in ((made.train_x, made.train_y), (made.test_x, made.test_y)):
        for row, label in zip(x.tolist(), y.tolist(), strict=True):
            assert bool(good & set(row)) == bool(label)


def test_rare_words_are_unknown_and_long_tweets_are_cut(official):
    made = load(official, users=2, words=5, length=4)
    assert made.info.vocabulary[2:] == ("!", "<user>", "day")
    assert made.train_x.unique(dim=0).tolist() == [[3, 1, 1, 4]]  # "@friend sad hate day|, 7!"


def test_the_vocabulary_is_that_of_the_training_tweets(official):
    made = load(official, users=1, test_share=0.5)
    seen = {made.info.vocabulary[k] for k in made.train_x.unique().tolist() if k > 1}
    assert seen == set(made.info.vocabulary[2:])
    assert (made.test_x == 1).any()  # day numbers that only the test tweets have


def test_users_at_random(official):
    drawn = {load(official, users=2, choose="random", seed=s).info.client_names for s in range(12)}
    assert len(drawn) > 3
    assert load(official, min_examples=12).info.client_names == ("ann", "bob", "dee")


def test_leafs_files_give_the_same(official, tmp_path):
    people.leaf(tmp_path / "l/sent140/data/all_data/all_data.json", people.leaf_tweets(COUNTS))
    made, same = load(tmp_path / "l", users=3), load(official, users=3)
    assert made.info.form == "LEAF json" and made.info.vocabulary == same.info.vocabulary
    for name in ("train_x", "train_y", "test_x", "test_y", "train_clients"):
        assert torch.equal(getattr(made, name), getattr(same, name))


def test_the_official_zip_is_read_in_place(official, tmp_path):
    data = (official / "sent140" / CSV).read_bytes()
    small.zip_of(tmp_path / "z/sent140" / ZIP, {CSV: data, "testdata.manual.csv": b""})
    assert torch.equal(load(tmp_path / "z").train_x, load(official).train_x)


def test_no_damage_of_the_zip_is_a_crash(official, tmp_path):
    path = tmp_path / "z" / "sent140" / ZIP
    small.zip_of(path, {CSV: (official / "sent140" / CSV).read_bytes()})
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + b"\xff\x00\xff" + whole[at + 3 :])
        with suppress(DataError):
            load(tmp_path / "z")
        path.write_bytes(whole[:at])
        with pytest.raises(DataError, match="cannot be read"):
            load(tmp_path / "z")


def test_latin_1_and_quotes_are_understood(tmp_path):
    text = b'"4","1","Mon","NO_QUERY","zo\xeb","caf\xe9 ""nice"", yes"\n'
    small.write(tmp_path / "sent140", {CSV: text * 2})
    made = load(tmp_path, test_share=0)
    assert made.info.client_names == ("zoë",)
    words = [made.info.vocabulary[k] for k in made.train_x[0].tolist() if k]
    assert words == ["café", "nice", ",", "yes"]


def test_part_of_the_official_file_is_refused_unless_asked_for(official):
    with pytest.raises(DataError, match=r"has 66 tweets, the official file 1600000.*verify=False"):
        load(official, verify=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'"4","1","Mon","Q","ann","hi"\n"2","1","Mon","Q","ann","hi"\n', "line 2: .*polarity 0"),
        (b'"4","1","Mon","ann","hi"\n', "line 1: .*this one has 5"),
        (b"", r"nobody in .* has 1 examples or more"),
    ],
)
def test_broken_csv_files_are_named(data, message, tmp_path):
    small.write(tmp_path / "sent140", {CSV: data})
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (["text"], [1], "entry 5 is the tweet"),
        ([["1", "Mon", "Q", "ann"]], [1], "user 'ann'"),
        ([["1", "Mon", "Q", "ann", "hi"]], [2], r"y should hold 0 \(negative\)"),
    ],
)
def test_broken_json_files_are_named(x, y, message, tmp_path):
    people.leaf(tmp_path / "sent140/a.json", {"ann": (x, y)})
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_missing_files_say_where_they_come_from(tmp_path):
    with pytest.raises(DataError, match=r"sent140 is not in .*trainingandtestdata.zip.*LEAF"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"users": 0}, "users must be at least 1"),
        ({"choose": "most"}, "no way to choose named 'most'"),
        ({"words": 2}, "words must be at least 3"),
        ({"length": 0}, "length must be at least 1"),
        ({"glove": 3}, "glove must be a file name, got 3"),
    ],
)
def test_mistakes_are_named(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **settings)


# ---- word vectors --------------------------------------------------------------------------------
VECTORS = {"day": (0.5, -1.0, 2.0), "!": (1.0, 0.0, 0.25), "ünused": (9.0, 9.0, 9.0)}


def test_words_come_with_vectors(official):
    people.glove(official / "sent140/small.txt", VECTORS)
    made = load(official, users=3, words=40, glove="sent140/small.txt")
    names = made.info.vocabulary
    assert made.embedding.shape == (40, 3) and made.embedding.dtype == torch.float32
    for word in ("day", "!"):
        assert made.embedding[names.index(word)].tolist() == list(VECTORS[word])
    assert not made.embedding[0].any() and not made.embedding[len(names) :].any()
    assert made.embedding[1 : len(names)].abs().sum(1).min() > 0  # missing words too
    assert load(official).embedding is None


def test_missing_words_are_normal_and_depend_on_seed_and_word_alone(tmp_path):
    path = people.glove(tmp_path / "g.txt", {"a": [2.0, -2.0] * 200})
    one = read_glove(path, ("<padding>", "<unknown>", "a", "b"))
    two = read_glove(path, ("<padding>", "<unknown>", "b", "a"))
    assert torch.equal(one[[0, 1, 3, 2]], two) and not torch.equal(one[1], one[3])
    assert one[3].std().item() == pytest.approx(2, rel=0.15) and one[3].mean().abs() < 0.4
    assert not torch.equal(read_glove(path, ("<padding>", "<unknown>", "a"), seed=1)[1], one[1])


def test_words_with_spaces_do_not_disturb(tmp_path):
    (tmp_path / "g.txt").write_text("the 1 2 3\n. . . 4 5 6\nday 7 8 9\n")
    made = read_glove(tmp_path / "g.txt", ("<padding>", "<unknown>", "day", "."))
    assert made[2].tolist() == [7, 8, 9] and made[3].tolist() != [4, 5, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "none of the 3 words"),
        ("400000 300\nday 1 2\n", "line 1 is no word with its numbers"),
        ("the 1 2\nday 1\n", "line 2 has 1 numbers, line 1 has 2"),
        ("the 1 2\nday 1 x\n", "line 2: could not convert"),
        ("the 1 2\nday 1 nan\n", "line 2 holds a number that is not finite"),
        ("the 1 2\n", "none of the 3 words, e.g. 'day'"),
    ],
)
def test_broken_vector_files_are_named(text, message, tmp_path):
    (tmp_path / "g.txt").write_text(text)
    with pytest.raises(DataError, match=rf"g.txt.*{message}"):
        read_glove(tmp_path / "g.txt", ("<padding>", "<unknown>", "day"))


def test_a_missing_vector_file_is_named(official):
    with pytest.raises(DataError, match=r"none.txt cannot be read .*nlp.stanford.edu"):
        load(official, glove="none.txt")

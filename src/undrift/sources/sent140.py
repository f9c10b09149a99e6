"""Sent140: tweets by user, positive or negative (Go et al. 2009), from the csv or LEAF's json."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from undrift.errors import ConfigError, DataError
from undrift.guarded.binary import BROKEN, open_entry, open_zip
from undrift.guarded.text import lines_of
from undrift.models.settings import whole
from undrift.sources.examples import Examples, Info, Unreadable
from undrift.sources.glove import read_glove
from undrift.sources.kept import KeptFiles, KeptSet, Layout, leaf_layouts, need
from undrift.sources.leaf import read_leaf
from undrift.sources.place import data_directory
from undrift.sources.users import (
    Choice,
    Sides,
    User,
    check_choice,
    check_share,
    check_some,
    hold_out,
    owners,
    targets,
)
from undrift.sources.words import encoded, numbered, tokens, vocabulary

CSV = "training.1600000.processed.noemoticon.csv"
ZIP = "trainingandtestdata.zip"
TWEETS = 1_600_000  # in the official file
COLUMNS = 6  # polarity, id, date, query, user, text
POLARITY = {"0": 0, "4": 1}
LEAF_POLARITY = {"0": 0, "1": 1, "4": 1}
LEAF_TEXT = 4  # where the tweet stands in LEAF's rows

SENT140 = KeptSet(
    "sent140",
    (
        Layout("csv", f"sent140/{CSV}", first=True),
        Layout("csv", CSV, first=True),
        Layout("csv", f"sent140/{ZIP}", first=True),
        *leaf_layouts("sent140"),
    ),
    f"Its authors offer {ZIP} with the file {CSV} (help.sentiment140.com/for-students); LEAF's "
    "scripts make json files of it (github.com/TalwalkarLab/leaf, data/sent140).",
)


class Tweet(NamedTuple):
    """One row of the csv."""

    user: str
    text: str
    label: int


def sent140(
    users: int | None = 500,
    choose: str = "largest",
    min_examples: int = 1,
    words: int = 3000,
    length: int = 25,
    glove: Path | str | None = None,
    test_share: float = 0.1,
    seed: int = 0,
    verify: bool = True,
    directory: Path | str | None = None,
) -> Examples:
    """Load tweets as rows of word numbers, padded with 0; the clients are the users.

    At most `users` are taken, the "largest" (rFedAvg) or at "random".  The vocabulary has `words`
    entries: padding, unknown, and the most frequent words of the training tweets.  `glove` names a
    file of word vectors, which then come with the examples.
    """
    choice = check_choice("sent140", "users", users, min_examples, seed, choose)
    share = check_share(test_share)
    whole("words", words, 3)
    whole("length", length)
    place = Path(directory or data_directory())
    vectors = None if glove is None else _vector_file(glove, place)
    found = need(SENT140, place)
    read = _read(found, choice, verify)
    sides = read if isinstance(read, Sides) else hold_out(read, share, choice.seed)
    return _examples(sides, found, words, length, vectors, choice.seed)


def _vector_file(glove: Path | str, directory: Path) -> Path:
    if not isinstance(glove, str | Path) or not str(glove):
        raise ConfigError(f"sources.sent140: glove must be a file name, got {glove!r}")
    given = Path(glove).expanduser()
    return given if given.exists() else directory / given


def _examples(
    sides: Sides, found: KeptFiles, words: int, length: int, vectors: Path | None, seed: int
) -> Examples:
    train, test = (
        [tokens(text) for user in users for text in user.x] for users in (sides.train, sides.test)
    )
    known = vocabulary(train, words)
    numbers = numbered(known)
    train_x, test_x = (torch.from_numpy(encoded(t, numbers, length)) for t in (train, test))
    info = Info(
        *("sent140", found.layout.form, found.path),
        class_names=("negative", "positive"),
        client_names=tuple(user.name for user in sides.train),
        vocabulary=known,
    )
    return Examples(
        *(train_x, targets(sides.train), test_x, targets(sides.test), 2, info),
        *(owners(sides.train), owners(sides.test)),
        None if vectors is None else read_glove(vectors, known, words, seed),
    )


def _read(found: KeptFiles, choice: Choice, verify: bool) -> Sides | list[User]:
    if found.layout.form != "csv":
        return read_leaf(found, _leaf_tweets, choice, "sent140")
    path = found.path
    # twice over the file: it has many more users than are wanted
    counts = Counter(tweet.user for tweet in _tweets(path))
    if verify and counts.total() != TWEETS:
        raise DataError(
            f"{path} has {counts.total()} tweets, the official file {TWEETS}: put the complete "
            "file there (verify=False reads a changed copy all the same)"
        )
    names = choice.names(counts)
    rows: dict[str, list[Tweet]] = {name: [] for name in sorted(names)}
    for tweet in _tweets(path):
        if tweet.user in names:
            rows[tweet.user].append(tweet)
    made = [User(n, *_columns([t.text for t in r], [t.label for t in r])) for n, r in rows.items()]
    check_some(made, choice, "sent140", path)
    return made


def _columns(texts: Sequence[str], labels: Sequence[int]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    return np.array(texts, dtype=object), np.array(labels, dtype=np.int64)


def _leaf_tweets(x: list[Any], y: list[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    texts = [row[LEAF_TEXT] for row in x if isinstance(row, list)]
    if len(texts) != len(x) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"x should hold lists whose entry {LEAF_TEXT + 1} is the tweet")
    labels = [LEAF_POLARITY.get(str(value)) for value in y]
    if None in labels:
        raise ValueError("y should hold 0 (negative) and 1 or 4 (positive)")
    return _columns(texts, [int(label or 0) for label in labels])


def _tweets(path: Path) -> Iterator[Tweet]:
    """Read the csv, alone or inside the official zip."""
    try:
        with ExitStack() as stack:
            raw: IO[bytes] = stack.enter_context(path.open("rb"))
            if path.suffix == ".zip":
                archive = stack.enter_context(open_zip(raw))
                raw = stack.enter_context(open_entry(archive, archive.getinfo(CSV)))
            text = io.TextIOWrapper(raw, encoding="latin-1", newline="")
            rows = csv.reader(lines_of(text))
            for row in rows:
                yield _tweet(row, path, rows.line_num)
    except (OSError, *BROKEN, csv.Error) as error:
        if isinstance(error, DataError) and not isinstance(error, Unreadable):
            raise
        raise DataError(f"{path} cannot be read ({error}): put the official file there") from error


def _tweet(row: list[str], path: Path, line: int) -> Tweet:
    if len(row) != COLUMNS or row[0] not in POLARITY:
        raise DataError(
            f"{path}, line {line}: a row should have {COLUMNS} columns (polarity 0 or 4, id, date, "
            f"query, user, text), this one has {len(row)} and begins with {str(row[:1])[:60]}: put "
            "official file there"
        )
    return Tweet(row[4], row[5], POLARITY[row[0]])

"""From texts to rows of numbers: words, a vocabulary, and a fixed length."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN = "<padding>", "<unknown>"  # the numbers 0 and 1
LINK, NAME = "<url>", "<user>"
SPECIAL = re.compile(r"(https?://\S+|www\.\S+)|@\w+")
TOKEN = re.compile(r"<url>|<user>|\w+(?:'\w+)*|[.,!?;:]")


def tokens(text: str) -> list[str]:
    """Cut a text into lower-case words and marks; links and @names become one word each.

    A word is a run of letters and digits, with apostrophes inside; of other characters . , ! ? ;
    and : are words of their own, and the rest is left out.

    >>> tokens("@ann I don't know :) &quot;why&quot;? http://a.b/c")
    ['<user>', 'i', "don't", 'know', ':', 'why', '?', '<url>']
    """
    plain = SPECIAL.sub(lambda m: LINK if m[1] else NAME, html.unescape(text))
    return TOKEN.findall(plain.lower())


def vocabulary(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """List the most frequent words, padding and unknown before them; ties in alphabetical order.

    >>> vocabulary([["b", "a"], ["a", "c", "b"]], 4)
    ('<padding>', '<unknown>', 'a', 'b')
    """
    counts = Counter(word for text in texts for word in text)
    order = sorted(counts, key=lambda word: (-counts[word], word))
    return PADDING, UNKNOWN, *order[: size - 2]


def numbered(vocabulary: Sequence[str]) -> dict[str, int]:
    """Number the words."""
    return {word: number for number, word in enumerate(vocabulary)}


def encoded(
    texts: Sequence[Sequence[str]], numbers: Mapping[str, int], length: int
) -> NDArray[np.int64]:
    """Number the first words of every text; shorter ones end in padding.

    A text without a word is one unknown word, so that every row has a last real step.

    >>> encoded([["b", "x"], [], ["b"] * 9], {"<padding>": 0, "<unknown>": 1, "b": 2}, 3)
    array([[2, 1, 0],
           [1, 0, 0],
           [2, 2, 2]])
    """
    rows = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in zip(rows, texts, strict=True):
        found = [numbers.get(word, 1) for word in text[:length]] or [1]
        row[: len(found)] = found
    return rows

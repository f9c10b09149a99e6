"""Before the first round over tables: ask for sums, make the preparation, hand it out.

Whoever answers badly, or not at all, takes no part in the run, and none of its sums count: the
questions that follow from them are asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from undrift.core.tree import EMPTY, Tree
from undrift.errors import FederationError, ReportRefused
from undrift.federated.checks import Accepted, Expected
from undrift.federated.exchange import Exchange
from undrift.federated.letters import FRESH, Down, DownOwn, words
from undrift.federated.sums import checked
from undrift.federated.wire import Form, Malformed, pack
from undrift.guarded.limits import limit
from undrift.tabular import (
    Preparation,
    Question,
    Schema,
    Sums,
    first_question,
    prepare,
    second_question,
    third_question,
)
from undrift.tabular.sums import ASKED

log = logging.getLogger("undrift")
Answers = dict[int, Sums]  # by client


class Terms(NamedTuple):
    """What an experiment says of its table."""

    schema: Schema
    least: int  # rows of a holder that name a level
    standardise: bool


class Preparing:
    """Talks with nodes about their tables, outside of rounds."""

    def __init__(self, exchange: Exchange, plan: str, clients: int) -> None:
        self.exchange, self.plan, self.clients = exchange, plan, clients

    # -- questions -----------------------------------------------------------------------------
    def agree(self, terms: Terms, sizes: Mapping[int, int]) -> tuple[Preparation, dict[int, int]]:
        """Make a preparation of everybody's sums; give whose sums are in it, with their sizes."""
        asked = first_question(terms.least)
        log.info("preparing: question 1 of %d", 3 if _needs_bins(terms.schema) else 2)
        first = self._answers(asked, terms.schema, sizes, {})
        while True:
            found = self._follow(terms, first, sizes)
            here = set.intersection(*(set(one) for one in found))
            if here == set(first):
                break
            first = {client: one for client, one in first.items() if client in here}
        if not first:
            raise FederationError(
                "nobody answered about its table: look into refused.jsonl and the nodes' logs"
            )
        totals = [_total(one) for one in found]
        made = prepare(terms.schema, *totals, standardise=terms.standardise)
        return made, {client: sizes[client] for client in sorted(first)}

    def _follow(self, terms: Terms, first: Answers, sizes: Mapping[int, int]) -> list[Answers]:
        """Ask what follows from the first answers."""
        found = [first]
        questions: list[Callable[[], Question | None]] = [
            lambda: second_question(_total(first)),
            lambda: third_question(terms.schema, _total(first), _total(found[1])),
        ]
        for number, question in enumerate(questions, 2):
            asked = question() if found[-1] else None
            if asked is not None:
                log.info("preparing: question %d of %d", number, _count(terms.schema))
                found.append(self._answers(asked, terms.schema, sizes, found[-1], first))
        return found

    def _answers(
        self,
        question: Question,
        schema: Schema,
        sizes: Mapping[int, int],
        who: Iterable[int],
        first: Answers | None = None,
    ) -> Answers:
        ids = sorted(who or sizes)
        form = Form(EMPTY, limit("letter_bytes"))
        got = self._ask("sums", 0, question.to_json(), form, ids)
        found: Answers = {}
        for client, one in sorted(got.items()):
            mine = None if first is None else first[client]
            try:
                found[client] = checked(one.words.told, question, schema, sizes[client], mine)
            except Malformed as error:
                self._refuse(client, "sums", str(error))
        return found

    # -- what was made of them -----------------------------------------------------------------
    def hand_out(self, made: Preparation, sizes: Mapping[int, int]) -> set[int]:
        """Give nodes the preparation; tell which clients have it now."""
        log.info("preparing: %d inputs of %d rows", made.inputs, made.rows)
        got = self._ask("prepare", 0, made.to_json(), Form(EMPTY), sorted(sizes))
        there = set()
        for client, one in got.items():
            if one.words.size == sizes[client]:
                there.add(client)
            else:
                told = f"{one.words.size} examples, {sizes[client]} when it greeted"
                self._refuse(client, "prepare", told)
        return there

    def hand_out_model(self, data: bytes, round: int, ids: Iterable[int]) -> set[int]:
        """Give nodes the last model; tell which clients have it now."""
        import torch

        file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        told = {"bytes": len(data)}
        return set(self._ask("model", round, told, Form(EMPTY), sorted(ids), {"file": file}))

    # -- messages ------------------------------------------------------------------------------
    def _ask(
        self,
        phase: str,
        round: int,
        told: dict[str, Any],
        form: Form,
        ids: Sequence[int],
        sent: Tree = EMPTY,
    ) -> dict[int, Accepted]:
        run = self.exchange.run
        common = pack(sent, words(Down(phase, run, round, self.plan, self.clients, 0, told)))
        own = {i: pack(EMPTY, words(DownOwn(phase, run, round, i, FRESH))) for i in ids}
        return self.exchange.ask(phase, round, common, own, form, [Expected(i) for i in ids], ())

    def _refuse(self, client: int, phase: str, cause: str) -> None:
        error = ReportRefused(client, 0, phase, cause)
        self.exchange.refusals(error, self.exchange.nodes.get(client))


def _total(answers: Answers) -> Sums:
    return reduce(add, (answers[client] for client in sorted(answers)))


def _needs_bins(schema: Schema) -> bool:
    return any(getattr(kind, "fill", None) == "median" for _, kind in schema.features)


def _count(schema: Schema) -> int:
    return len(ASKED) if _needs_bins(schema) else len(ASKED) - 1

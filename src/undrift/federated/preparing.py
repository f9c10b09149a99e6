"""Before the first round over tables: ask for sums, make the preparation, hand it out.

Whoever answers badly, or not at all, takes no part in the run, and none of its sums count: the
questions that follow from them are asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch

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
from undrift.tabular.holders import Asked
from undrift.tabular.sums import ASKED

log = logging.getLogger("undrift")
Answers = dict[int, Sums]  # by client


class Preparing:
    """Talks with nodes about their tables, outside of rounds."""

    def __init__(self, exchange: Exchange, plan: str, clients: int) -> None:
        self.exchange, self.plan, self.clients = exchange, plan, clients

    # -- questions -----------------------------------------------------------------------------
    def agree(self, asked: Asked, sizes: Mapping[int, int]) -> tuple[Preparation, dict[int, int]]:
        """Make a preparation of everybody's sums; give whose sums are in it, with their sizes."""
        schema = asked.schema
        first = self._answers(first_question(asked.least), schema, sizes)
        while True:
            found = self._follow(schema, first, sizes)
            here = set.intersection(*(set(one) for one in found))
            if here == set(first):
                break
            first = {client: one for client, one in first.items() if client in here}
        if not first:
            raise FederationError(
                "nobody answered about its table: look into refused.jsonl and the nodes' logs"
            )
        totals = [_total(one) for one in found]
        made = prepare(schema, *totals, standardise=asked.standardise)
        return made, {client: sizes[client] for client in sorted(first)}

    def _follow(self, schema: Schema, first: Answers, sizes: Mapping[int, int]) -> list[Answers]:
        """Ask what follows from the first answers, as long as somebody answers."""
        found = [first]
        while found[-1] and len(found) < _questions(schema):
            totals = [_total(one) for one in found]
            asked = second_question(*totals) if len(found) == 1 else third_question(schema, *totals)
            assert asked is not None, "_questions counts them"
            found.append(self._answers(asked, schema, {i: sizes[i] for i in found[-1]}, first))
        return found

    def _answers(
        self,
        question: Question,
        schema: Schema,
        sizes: Mapping[int, int],
        first: Answers | None = None,
    ) -> Answers:
        number, of = ASKED.index(question.asks) + 1, _questions(schema)
        log.info("preparing: question %d of %d to %d clients", number, of, len(sizes))
        form = Form(EMPTY, limit("letter_bytes"))
        got = self._ask("sums", 0, question.to_json(), form, sorted(sizes))
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


def _questions(schema: Schema) -> int:
    """Count the questions that a schema needs: the last one is about medians."""
    medians = any(getattr(kind, "fill", None) == "median" for _, kind in schema.features)
    return len(ASKED) if medians else len(ASKED) - 1

"""What goes to a device in one transfer."""

from __future__ import annotations

import torch

from undrift.core.transfer import APART, Mail
from undrift.core.tree import leaves

CPU = torch.device("cpu")


def a_message(first: int) -> dict:
    numbers = torch.arange(first, first + 15).reshape(3, 5)
    return {"numbers": numbers, "info": (numbers[0] * 2, numbers[1].double() / 7, numbers[0] > 6)}


def test_mail_arrives_where_it_was():
    mail = Mail(a_message(0), CPU)
    places = [v.data_ptr() for v in leaves(mail.trees)]
    for first in (3, 8):
        sent = a_message(first)
        mail.send(sent)
        pairs = list(zip(leaves(mail.trees), leaves(sent), strict=True))
        assert all(torch.equal(there, here) and there.dtype == here.dtype for there, here in pairs)
        assert [v.data_ptr() for v in leaves(mail.trees)] == places


def test_parts_of_a_message_begin_apart():
    """Compiled code copies what begins at an odd place."""
    mail = Mail(a_message(0), CPU)
    starts = [v.data_ptr() for v in leaves(mail.trees)]
    assert len(starts) == 4 and all((s - starts[0]) % APART == 0 for s in starts)
    assert len({v.untyped_storage().data_ptr() for v in leaves(mail.trees)}) == 1


def test_a_part_may_be_sent_by_itself():
    mail = Mail(a_message(0), CPU)
    sent = a_message(4)["numbers"]
    mail.send({"numbers": sent})
    assert torch.equal(mail.trees["numbers"], sent)

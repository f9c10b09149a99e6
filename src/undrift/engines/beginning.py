"""The beginning of a round on a device: by one function, where nothing has to be measured first.

Letters: S experiments, C clients of a cohort and the padding behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrift.core.algorithm import Broadcast, Client, Server
from undrift.core.histories import Histories
from undrift.core.rule import ClientInfo
from undrift.core.tree import EMPTY, Tree, tree_map
from undrift.engines.branches import Aside
from undrift.engines.deciding import Deciding
from undrift.engines.drawing import Drawing
from undrift.engines.fused import Fused
from undrift.engines.graphs import Buffers, write_over
from undrift.engines.loading import STEPS, Loading
from undrift.engines.seating import Seating
from undrift.engines.state_rows import are_states
from undrift.engines.turns import Crew


class Beginning:
    """Brings everybody to the received model, and gives what models are made of."""

    def __init__(
        self,
        crews: Sequence[Crew],
        deciding: Deciding,
        buffers: Buffers,
        loading: Loading,
        drawing: Drawing,
        seating: Seating,
        aside: Aside,
    ) -> None:
        self._crews, self._deciding, self._buffers = crews, deciding, buffers
        self._loading, self._drawing, self._seating = loading, drawing, seating
        self._aside = aside
        compiled = deciding.device.type == "cuda"
        self._send = Fused(self._sent, "the model that is sent", compiled=compiled, proven=True)
        self._at_once = Fused(
            self._begun, "the beginning of a round", compiled=compiled, proven=True
        )

    @property
    def _histories(self) -> Histories | None:
        return self._deciding.stepping.histories

    @property
    def at_once(self) -> bool:
        """Whether all that a round begins with can be written by one function."""
        alone = len(self._crews) == len(self._crews[0].inside) == 1
        done_before = "carry 0" in self._buffers and not self._deciding.pending
        hooks = any(self._crews[0].group.uses(hook) for hook in ("probe", "begin", "start"))
        return alone and done_before and not hooks

    def write(self) -> Callable[[], None]:
        """Begin a round at once; clients' own vectors are still to be narrowed.

        Models lie there and batches are drawn.  What it gives has to be called before anything
        else is read that a round begins with (`may_be_late`).
        """
        server = self.seen_servers(0)
        self._buffers["k"].zero_()  # a graph whose first nodes are two begins one of them late
        begun = done = self._aside.run(partial(self._bring_models, server))
        try:
            done = self._aside.run(partial(self._set_out, server))
            self._drawing.draw([(server.round, self._buffers["numbers"][:, 0])])
        except BaseException:
            done()
            raise
        begun()
        return done

    @property
    def may_be_late(self) -> bool:
        """Whether a step reads models and batches alone before a layer that remembers.

        Plain steps ask for rates first, and modules for their buffers.  What layers take in of
        clients must be there, too: states are, what servers write to clients is not.
        """
        chain = self._deciding.stepping.chains.get(0)
        if chain is None or self._histories is None or self._seating.has_buffers:
            return False
        own = chain.own(self._buffers["clients 0"])
        return self._histories.used and are_states(own, self._buffers["state 0"])

    def _bring_models(self, server: Server) -> None:
        """Write the model that is sent, and what steps move of it."""
        broadcast = self._buffers["broadcast 0"]
        self._send(server, self._buffers["info"], self._buffers["numbers"], broadcast.w)
        if self._histories is not None:
            clients = self._seating.clients
            self._seating.put_model(broadcast.w[:, None].expand(-1, clients, -1))

    def _set_out(self, server: Server) -> None:
        """Bring all else to where everybody begins."""
        buffers, histories = self._buffers, self._histories
        if self._loading.rows is not None:
            self._loading.rows.fetch()
        held = [buffers[name] for name in ("broadcast 0", "known 0", "k", "carry 0")]
        held[0], held[-1] = held[0]._replace(w=EMPTY), self._seating.but_vectors(held[-1])
        fresh = EMPTY if histories is None else histories.fresh
        self._at_once(server, buffers["info"], buffers["numbers"], held, fresh)
        if histories is not None:
            started = self._crews[0].group.start(buffers["broadcast 0"], buffers["clients 0"])
            self._seating.put_but_model(started)
            histories.clear()

    def _sent(self, server: Server, info: ClientInfo, numbers: Tensor, to: Tensor) -> Tree:
        """Write the model that is sent."""
        to.copy_(self._opened(server, info, numbers)[0].w)
        return EMPTY

    def _opened(
        self, server: Server, info: ClientInfo, numbers: Tensor
    ) -> tuple[Broadcast, Client]:
        every = numbers[:, STEPS:].to(self._deciding.task.dtype)
        size, seeds = numbers[:, 1].to(every), numbers[:, 0]
        return self._crews[0].group.open(server, info, EMPTY, every, size, seeds)

    def _begun(
        self, server: Server, info: ClientInfo, numbers: Tensor, held: Tree, fresh: Any
    ) -> Tree:
        """Write the broadcast, bring everybody to the received model, and begin histories."""
        broadcast, clients = self._opened(server, info, numbers)
        started = self._crews[0].group.start(broadcast, clients)
        carry, none = self._seating.but_vectors(started), torch.zeros_like(clients.steps[0, 0])
        rest = broadcast._replace(w=EMPTY)
        write_over(held, [rest, self._seating.but_loaded(clients), none, carry])
        if self._histories is not None:
            chain = self._deciding.stepping.chains.get(0)
            more = [] if chain is None else chain.shared(broadcast)[1:]
            self._histories.set_out(fresh, broadcast.w, more, clients.steps)
        return EMPTY

    def narrow(self, *, on_the_way: bool = False) -> None:
        """Let layers that remember take in what each client has, now or when it is first read."""
        if self._histories is not None:
            self._histories.take_in(self.vectors()[1], on_the_way=on_the_way)

    def vectors(self) -> tuple[list[Tensor], list[Any]]:
        """Give what weights are made of besides the received model and gradients.

        Vectors of clients are tensors, or lie elsewhere.
        """
        chain, rows = self._deciding.stepping.chains.get(0), self._loading.rows
        if chain is None:
            return [], []
        broadcast, clients = self._buffers["broadcast 0"], self._buffers["clients 0"]
        own = chain.own(clients)
        return chain.shared(broadcast)[1:], own if rows is None else [rows.lying(v) for v in own]

    def seen_servers(self, g: int) -> Server:
        """Put together what clients see of their servers: all but the server optimizer's state."""
        crew = self._crews[g]
        count = len(crew.group.algo.rules)
        found = [self._buffers[f"server {g} {h}"] for h in range(len(crew.inside))]
        seen = [server._replace(states=server.states[:count]) for server in found]
        made: Server = tree_map(lambda *v: torch.cat(v), *seen) if len(seen) > 1 else seen[0]
        return made

"""I-44, I-45: ComFed's grid, and the server's momentum in its local steps."""

import pytest

import undrift as fl
from crossed import crossed
from longhand.cases import HEAVY, above, below
from proofs.bridge import gap, local_of, run
from proofs.common import SOME5, equal, unequal
from undrift.verify.longhand.worlds import World

SERVERS = ["sgd", "adam", "adagrad", "yogi"]


CLIENTS = ["sgd", "prox", "scaf", "nova"]


def cell(client: str, server: str, **more) -> fl.Algorithm:
    adaptive = {} if server == "sgd" else {"tau": 1e-3, "server_lr": 0.05}
    return fl.comfed(client, server, **adaptive, **more)


@pytest.mark.parametrize(
    "server",  # the others are another formula of yogi's rule
    ["sgd", "yogi", *(pytest.param(s, marks=pytest.mark.slow) for s in ("adam", "adagrad"))],
)
def test_i44_cells_that_must_agree(mlp, server):
    b, same = unequal(mlp), equal(mlp)
    plain = run(mlp, SOME5, b, cell("sgd", server))
    below("I-44 mu 0", gap(run(mlp, SOME5, b, cell("prox", server, mu=0.0)), plain), 0.0)
    literal = cell("scaf", server, mode="literal")
    below("I-44 literal", gap(run(mlp, SOME5, b, literal), plain), 0.0)
    nova, steady = (run(mlp, SOME5, same, cell(c, server)) for c in ("nova", "sgd"))
    below("I-44 nova, equal steps", gap(nova, steady), 1e-12)


@pytest.mark.parametrize("server", ["sgd", "yogi"])
def test_i44_every_other_pair_of_cells_differs(mlp, server):
    b = unequal(mlp)
    algos = [cell(c, server, **({"mu": 0.5} if c == "prox" else {})) for c in CLIENTS]
    algos += [cell("scaf", server, mode="fresh"), cell("scaf", server, option="II")]
    algos += [cell("scaf", server, c_weights="size")]
    found = [run(mlp, SOME5, b, algo) for algo in algos]
    for at, first in enumerate(found):
        for second in found[at + 1 :]:
            above("I-44 different cells", gap(first, second), 1e-6)


def test_i44_the_grid_is_a_cross_product():
    for server in SERVERS:
        column = {c: fl.comfed(c, server) for c in CLIENTS}
        assert len({algo.server for algo in column.values()}) == 1
        assert len({algo.local for algo in column.values()}) == 1
    for client in CLIENTS:
        row = [fl.comfed(client, s) for s in SERVERS]
        assert len({(algo.rules, algo.aggregate) for algo in row}) == 1
        assert len({algo.server for algo in row}) == 4


@pytest.mark.parametrize(
    ("client", "alone"),
    [("sgd", fl.fedavg), ("prox", fl.fedprox), ("nova", fl.fednova), ("scaf", fl.scaffold)],
)
def test_i44_the_first_column_is_the_named_algorithms(mlp, client, alone):
    local = local_of(HEAVY)
    settings = {"prox": {"mu": 0.005}, "scaf": {"option": "I", "by_size": True}}.get(client, {})
    b = unequal(mlp)
    found = run(mlp, SOME5, b, fl.comfed(client, "sgd", local=local))
    below("I-44 alone", gap(found, run(mlp, SOME5, b, alone(local=local, **settings))), 0.0)


@pytest.mark.parametrize("option", ["I", "II"])
def test_comfed_scaf_is_scaffold_for_equal_sizes_only(mlp, option):
    local = local_of(HEAVY)
    same = World([(x[:7], y[:7]) for x, y in mlp.data], mlp.gradient, mlp.loss, mlp.w0)
    for world, compare in ((same, below), (mlp, above)):
        b = unequal(world)
        grid = run(world, SOME5, b, fl.comfed("scaf", "sgd", local=local, option=option))
        alone = run(world, SOME5, b, fl.scaffold(local=local, option=option))
        compare("scaf = scaffold", gap(grid, alone), 1e-12 if compare is below else 1e-4)


@pytest.mark.parametrize(
    ("client", "server", "style"), crossed(CLIENTS, ["sgd", "yogi"], ["mimelite", "fedadc"])
)
def test_i45_local_momentum_without_b_is_comfed(mlp, client, server, style):
    more = {} if server == "sgd" else {"tau": 1e-3, "server_lr": 0.05}
    b = unequal(mlp)
    plain = run(mlp, SOME5, b, fl.comfed(client, server, **more))
    bare = fl.comfed(client, server, local_momentum=style, b=0.0, **more)
    below("I-45", gap(run(mlp, SOME5, b, bare), plain), 0.0)
    some = fl.comfed(client, server, local_momentum=style, b=0.5, **more)
    above("I-45 b .5", gap(run(mlp, SOME5, b, some), plain), 1e-5)

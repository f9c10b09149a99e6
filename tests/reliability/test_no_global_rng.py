"""B10: the library draws from no generator that it does not own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import undrift

SOURCE = Path(undrift.__file__).parent
DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "poisson", "normal", "dropout", "alpha_dropout", "rrelu"),
    *("manual_seed", "seed", "manual_seed_all", "set_rng_state", "get_rng_state", "initial_seed"),
    *("default_rng", "shuffle", "fork_rng"),
}
IN_PLACE = {
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_"),
    *("cauchy_", "log_normal_"),
}
MODULES = {"torch", "torch.random", "torch.cuda", "F", "functional", "torch.nn.functional"}
ALLOWED = {
    ("core/trouble.py", "torch.random.fork_rng"),  # puts the generators back
    ("core/task.py", "torch.random.fork_rng"),
    ("experiment/blueprint.py", "torch.random.fork_rng"),
    ("core/task.py", "torch.manual_seed"),  # between fork_rng and its end
    ("testing/world.py", "torch.random.fork_rng"),
    ("testing/world.py", "torch.manual_seed"),  # between fork_rng and its end
    # stable-baselines3 draws from the global ones: seeded for a rollout, put back after it
    ("agent/training.py", "random"),
    ("agent/training.py", "np.random"),
    *[("agent/training.py", f"random.{name}") for name in ("seed", "getstate", "setstate")],
    *[("agent/training.py", f"np.random.{name}") for name in ("seed", "get_state", "set_state")],
    ("agent/training.py", "torch.random.fork_rng"),
    ("agent/training.py", "torch.manual_seed"),
    # reads their states, to see whether a traced function draws from them
    *[("program/trace.py", name) for name in ("random", "random.getstate", "np.random")],
    *[("program/trace.py", name) for name in ("np.random.get_state", "torch.get_rng_state")],
    # names, keys and noise that nobody may guess, from the operating system
    ("engines/ray_cluster.py", "secrets"),
    ("engines/ray_cluster.py", "secrets.token_hex"),
    ("core/noise.py", "secrets"),
    ("core/noise.py", "secrets.token_bytes"),
    ("federated/server.py", "secrets"),
    ("federated/server.py", "secrets.token_hex"),
    # compares generators that a rule holds, by their kinds
    *[("identity/walk.py", name) for name in ("random", "random.Random", "np.random")],
    *[("identity/walk.py", f"np.random.{name}") for name in ("RandomState", "Generator")],
    # generators of their own, made with a seed where they are used
    ("verify/longhand/two_blocks.py", "np.random"),
    ("verify/longhand/two_blocks.py", "np.random.default_rng"),
    ("verify/longhand/worlds.py", "np.random"),
    ("verify/longhand/worlds.py", "np.random.Generator"),
    ("verify/longhand/worlds.py", "np.random.default_rng"),
}


def dotted(node):
    """Write `a.b.c` for an attribute; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return None


def imported(node):
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{a.name}" for a in node.names]
    return []


def is_global(name):
    owner, _, last = name.rpartition(".")
    return (
        name.split(".")[0] in ("random", "secrets")
        or name.startswith(("np.random", "numpy.random", "torch.nn.init", "nn.init", "os.urandom"))
        or (last in DRAWS and owner in MODULES)
        or last in IN_PLACE
    )


def owned(node):
    """Tell a call that draws from a generator that it is given."""
    return isinstance(node, ast.Call) and any(k.arg == "generator" for k in node.keywords)


def global_draws(text):
    """List every name in a source text that reads or moves a global generator."""
    nodes = list(ast.walk(ast.parse(text)))
    given = {id(n.func) for n in nodes if owned(n)}
    used = [n for n in nodes if isinstance(n, ast.Attribute) and id(n) not in given]
    names = [dotted(n) or n.attr for n in used] + [name for n in nodes for name in imported(n)]
    return sorted({name for name in names if is_global(name)})


def test_no_module_uses_a_global_generator():
    files = sorted(SOURCE.rglob("*.py"))
    texts = {str(p.relative_to(SOURCE)): p.read_text() for p in files}
    found = {(name, use) for name, text in texts.items() for use in global_draws(text)}
    assert found <= ALLOWED and len(files) > 20


@pytest.mark.parametrize(
    "text",
    [
        "torch.rand(3)",
        "torch.manual_seed(0)",
        "torch.cuda.manual_seed_all(0)",
        "np.random.rand()",
        "np.random.default_rng()",
        "import random",
        "from random import choice",
        "import numpy.random",
        "from torch import randperm",
        "from torch.nn import init; nn.init.zeros_(w)",
        "w.normal_()",
        "(a + b).uniform_()",
        "F.dropout(x)",
    ],
)
def test_the_check_itself_finds_a_draw(text):
    assert global_draws(text)


def test_the_check_itself_lets_our_own_randomness_pass():
    ours = "from undrift.core.random import normal; normal(key, 0); seeds.seed; x.copy_(y)"
    assert not global_draws(ours + "; torch.randn(3, generator=own); torch.Generator()")

"""Attention for many clients at once: no fused kernel under vmap, the numbers of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import undrift as fl
from undrift.core.batching import batching
from undrift.core.ops import Pass
from undrift.errors import TaskError
from undrift.testing.compare import difference
from undrift.testing.world import numbers

WORDS, WIDTH, LENGTH, MANY = 7, 8, 5, (3, 8, 5)


class Attentive(nn.Module):
    """Words, one kind of attention over them, a way around it, a head."""

    def __init__(self, heads: nn.Module, attend) -> None:
        super().__init__()
        self.words, self.heads, self.attend = nn.Embedding(WORDS, WIDTH), heads, attend
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        return self.head((y + self.attend(self.heads, y, x)).mean(1))


def fused(**options):
    """Attention by torch's function; options may depend on the words."""

    def attend(heads: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        q, k, v = heads(y).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        now = {name: o(y, x) if callable(o) else o for name, o in options.items()}
        return F.scaled_dot_product_attention(q, k, v, **now).transpose(1, 2).flatten(2)

    return lambda: Attentive(nn.Linear(WIDTH, 3 * WIDTH), attend)


def heads(**options):
    """Attention by torch's module, masked where options say so."""

    def attend(heads: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        return heads(y, y, y, **{name: o(y, x) for name, o in options.items()})[0]

    return lambda: Attentive(nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend)


def grouped(heads: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    q, k, v = heads(y).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
    q, k, v = (t.unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for t in (q, k, v[:, :3]))
    k = k[:, :, :3]  # keys and values are fewer than questions, in length and heads
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


def encoder(heads: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    return heads(y, src_key_padding_mask=x == 0)


def layer(dropout: float = 0.0, first: bool = False) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout, batch_first=True, norm_first=first)


def below(y: Tensor, x: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def after(y: Tensor, x: Tensor) -> Tensor:
    return ~below(y, x)


def known(y: Tensor, x: Tensor) -> Tensor:
    # some examples keep no word at all
    return (x > 4)[:, None, None, :].expand(-1, 1, LENGTH, -1)


def slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.arange(LENGTH, dtype=y.dtype).log1p().neg().expand(LENGTH, LENGTH)


MODULES = {
    "plain": fused(),
    "causal": fused(is_causal=True, scale=0.3),
    "mask": fused(attn_mask=below),
    "mask of each example": fused(attn_mask=known),
    "numbers added": fused(attn_mask=slope),
    "grouped": lambda: Attentive(nn.Linear(WIDTH, 2 * WIDTH), grouped),
    "heads": heads(),
    "heads with masks": heads(key_padding_mask=lambda y, x: x == 0, attn_mask=after),
    "encoder layer": lambda: Attentive(layer(), encoder),
    "encoder": lambda: Attentive(nn.TransformerEncoder(layer(), 2), encoder),
    "encoder, norms first": lambda: Attentive(layer(first=True), encoder),
}
ALGORITHMS = {  # a plain step, a probe, a look at the own final model
    "fedavg": lambda: fl.fedavg(0.1),
    "mime": lambda: fl.mime(0.1),
    "scaffold": lambda: fl.scaffold(0.1),
}


def clients() -> list[tuple[Tensor, Tensor]]:
    maker = torch.Generator().manual_seed(3)

    def one(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, WORDS, (n, LENGTH), generator=maker)
        x[:, 0] = 1  # no text is padding alone, which comes last
        return x.sort(1, descending=True).values, torch.randint(0, 3, (n,), generator=maker)

    return [one(n) for n in MANY]


def trained(module: nn.Module, algorithm: str, dtype: torch.dtype, **options) -> fl.Trainer:
    task = fl.Task(module, dtype=dtype)
    work = fl.Work(epochs=1, batch=4)
    made = fl.Trainer(
        task, fl.Federation.of(clients()), ALGORITHMS[algorithm](), work=work, **options
    )
    made.run(2)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODULES)
def test_every_engine_trains_it_without_a_warning(name, dtype):
    torch.manual_seed(0)
    module = MODULES[name]()
    near = 1e-11 if dtype == torch.float64 else 1e-4
    for algorithm in ALGORITHMS:
        wanted = trained(module, algorithm, dtype, engine="reference")
        for options in ({}, {"graph": True}):
            found = trained(module, algorithm, dtype, **options)
            assert not difference(numbers(found), numbers(wanted), near)
            x, y = clients()[0]
            judged = found.evaluate(x, y), wanted.evaluate(x, y)
            assert judged[0] == pytest.approx(judged[1], abs=near)


FUSED = ("_scaled_dot_product_", "_native_multi_head", "_transformer_encoder", "_fused_sdp")


class _Names(TorchDispatchMode):
    """Collects the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_under_vmap_nothing_reaches_a_fused_kernel(name, training):
    torch.manual_seed(0)
    task = fl.Task(MODULES[name]())
    w, buffers = task.initial()
    x = clients()[1][0]

    def forward(w: Tensor) -> Tensor:
        run = Pass(torch.ones(len(x), dtype=torch.bool), None, training)
        return task.forward(w, buffers, x, run).value

    models = torch.stack([w, w * 1.1])
    with torch.set_grad_enabled(training), _Names() as seen:
        found = torch.func.vmap(forward)(models)
    assert not [n for n in seen.names if n.startswith(FUSED)]
    for one, w in zip(found, models, strict=True):
        assert torch.allclose(one, forward(w), atol=1e-5)


def test_a_single_client_keeps_the_fused_kernel():
    """The exchange is for vmap alone."""
    task = fl.Task(MODULES["plain"]())
    w, buffers = task.initial()
    with _Names() as seen:
        task.forward(w, buffers, clients()[0][0], Pass(training=True))
    assert any(n.startswith(FUSED) for n in seen.names)
    assert batching().__class__.__name__ == "nullcontext"


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (fused(dropout_p=0.2), "Attentive"),
        (lambda: Attentive(layer(dropout=0.1), encoder), "'heads.self_attn'"),
    ],
)
def test_dropout_inside_attention_is_refused_before_training(module, place):
    with pytest.raises(TaskError, match=rf"{place}.* draws random numbers"):
        trained(module(), "fedavg", torch.float32)

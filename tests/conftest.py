"""Without a CUDA device Triton's interpreter stands in; it must be asked for before any import."""

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# nohup and shells that start something in the background leave signals ignored; a child inherits
# that, a shell among them can never trap them, and tests that send signals would wait for ever
for _signal, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _usual)


@pytest.fixture
def traced(monkeypatch):
    """Record the algebra as a device does, though nothing is compiled."""
    monkeypatch.setattr("undrift.engines.fused.TRACES", True)
    monkeypatch.setattr("undrift.engines.fused.make_fx", _quick_make_fx)


def _quick_make_fx(function):
    """Trace with one fake mode: torch makes one per operation, and reads the whole stack for it."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def trace(*values):
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            return make_fx(function)(*values)

    return trace


@pytest.fixture
def recorded(monkeypatch):
    """Record and replay the pieces of a round as a device does: see tests/engines/replaying.py."""
    from replaying import Replayed, watch_compiled

    from undrift.engines import device_round

    monkeypatch.setattr(Replayed, "recorded", [], raising=False)
    monkeypatch.setattr(device_round, "Piece", Replayed)
    too_late = watch_compiled(monkeypatch)
    yield Replayed.recorded
    assert not too_late, "compiled for the first time while a round is recorded"

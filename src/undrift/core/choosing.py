"""Which of several ways is fastest here: measured once, remembered, and part of a run's plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import torch

from undrift import kernels
from undrift.kernels.memory import recall, remember

log = logging.getLogger("undrift")

_ways: dict[str, str] = {}  # by what is computed, how large it is, and where
REPEATS = 3
ASLEEP = 8_000_000  # cycles, some 4 ms: a call is queued by then


def chosen_ways() -> dict[str, str]:
    """Give the choices that were made so far, as plain JSON."""
    return dict(_ways)


def use_ways(ways: dict[str, str]) -> None:
    """Repeat the choices of an earlier run; they decide rounding."""
    _ways.update(ways)


def choose(
    key: str, device: torch.device, names: Iterable[str], work: Callable[[str], object]
) -> str:
    """Give the fastest way to do `work(name)`, measured unless it is known.

    While a CUDA graph is captured nothing can be measured: the first name serves.
    """
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    full, names = f"{key}, {card}", list(names)
    if full in _ways:
        return _ways[full]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return names[0]
    lasting = device.type == "cuda" and kernels.available(device)
    if lasting and (found := (recall(full) or {}).get("way")) in names:
        _ways[full] = found
        return found
    times = {name: _seconds(lambda name=name: work(name), device) for name in names}  # type: ignore[misc]
    _ways[full] = min(times, key=lambda name: times[name])
    if lasting:
        remember(full, {"way": _ways[full]})
    told = ", ".join(f"{name} {1e3 * taken:.2f} ms" for name, taken in times.items())
    log.debug("%s: %s (%s)", full, _ways[full], told)
    return _ways[full]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time a call, the best of some; infinite if it fails, for instance for want of memory."""
    once = _on_card if device.type == "cuda" else _on_host
    try:
        work()
        return min(once(work) for _ in range(REPEATS))
    except RuntimeError as trouble:
        log.debug("cannot be timed: %s", trouble)
        return float("inf")


def _on_host(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _on_card(work: Callable[[], object]) -> float:
    """Time what a call queues, without the time that the host takes to queue it.

    Recorded rounds are replayed without the host; the card sleeps while the call is queued.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(ASLEEP)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3

"""How fast models that people bring train: ours, a plain loop and JAX, side by side in one run.

    python benchmarks/models.py --json models.json      on a CUDA device
    python benchmarks/models.py --tiny                  the same code on little work, on any

A round is the local steps of a cohort from one model, one batch a client, and the mean of what
comes out.  `plain` trains client after client with torch, in the same precision.  `jax` is
benchmarks/models_jax.py, where JAX is installed.  Times are of the wall clock: rounds in a row, one
wait at the end.  `apart` is how far the change that the first round makes lies from that of a plain
loop in float32, relative to it.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import undrift as fl
from models_works import WORKS, Work, draw, every_letter
from undrift.experiment.environment import commit

ALGORITHMS = {
    "fedavg": lambda lr: fl.fedavg(lr),
    "scaffold_momentum": lambda lr: fl.scaffold(local=fl.sgd(lr, momentum=0.9)),
}


def trainer(work: Work, module: nn.Module, algorithm, clients, arguments) -> fl.Trainer:
    loss = every_letter if work.data == "letters" else "cross_entropy"
    metrics = {} if work.data == "letters" else None
    task = fl.Task(copy.deepcopy(module), loss=loss, metrics=metrics)
    return fl.Trainer(
        task, fl.Federation.of(clients), algorithm,
        work=fl.Work(epochs=work.steps, batch=work.batch), seed=0, device=arguments.device,
        precision=arguments.precision if arguments.device == "cuda" else None,
    )  # fmt: skip


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call, device: str, seconds: float) -> float:
    """Milliseconds of a call, of as many in a row as take some seconds."""
    call(1)
    wait(device)
    start = time.perf_counter()
    call(2)
    wait(device)
    one = (time.perf_counter() - start) / 2
    count = max(3, min(200, int(seconds / max(one, 1e-4))))
    start = time.perf_counter()
    call(count)
    wait(device)
    return (time.perf_counter() - start) / count * 1e3


class PlainLoop:
    """FedAvg, client after client."""

    def __init__(self, work: Work, module: nn.Module, clients, device: str, precision: str) -> None:
        self.work, self.device = work, device
        self.net = copy.deepcopy(module).to(device)
        self.names = [n for n, p in self.net.named_parameters() if p.requires_grad]
        self.clients = [(x.to(device), y.to(device)) for x, y in clients]
        self.loss = every_letter if work.data == "letters" else None
        self.half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def round(self) -> None:
        held = dict(self.net.named_parameters())
        own = [held[name] for name in self.names]
        before = [p.detach().clone() for p in own]
        total = [torch.zeros_like(p) for p in before]
        for x, y in self.clients:
            with torch.no_grad():
                for p, start in zip(own, before, strict=True):
                    p.copy_(start)
            optimizer = torch.optim.SGD(own, self.work.lr)
            for _ in range(self.work.steps):
                optimizer.zero_grad(set_to_none=True)
                inside = torch.autocast(self.device, self.half) if self.half else nullcontext()
                with inside:
                    out = self.net(x)
                loss = (
                    F.cross_entropy(out.float(), y)
                    if self.loss is None
                    else self.loss(out.float(), y).mean()
                )
                loss.backward()
                optimizer.step()
            for t, p in zip(total, own, strict=True):
                t += p.detach() / len(self.clients)
        with torch.no_grad():
            for p, mean in zip(own, total, strict=True):
                p.copy_(mean)

    def weights(self) -> torch.Tensor:
        held = dict(self.net.named_parameters())
        return torch.cat([held[name].detach().flatten().float().cpu() for name in self.names])


def measure(name: str, work: Work, arguments) -> dict:
    if arguments.tiny:
        work = work._replace(cohort=3, batch=4, steps=2)
    torch.manual_seed(0)
    module, maker = work.make(arguments.tiny), torch.Generator().manual_seed(1)
    clients = [draw(work.data, work.batch, arguments.tiny, maker) for _ in range(work.cohort)]
    row: dict = {"work": name, "parameters": sum(p.numel() for p in module.parameters())}
    device, seconds = arguments.device, arguments.seconds
    change = None
    if "plain" in arguments.sides:
        strict = PlainLoop(work, module, clients, device, "float32")
        start = strict.weights()
        strict.round()
        change = strict.weights() - start
        plain = PlainLoop(work, module, clients, device, arguments.precision)
        plain.round()
        if not has_dropout(module):
            row["plain_apart"] = relative(plain.weights() - start, change)
        row["plain_ms"] = round(
            timed(lambda n: [plain.round() for _ in range(n)], device, seconds), 3
        )
        del plain, strict
    kinds = {"own": module}
    if hasattr(module, "as_sequence") and "sequence" in arguments.sides:
        kinds["sequence"] = module.as_sequence()
    for kind, net in kinds.items():
        for label, make in ALGORITHMS.items():
            if label in arguments.algorithms and "ours" in arguments.sides:
                like = change if label == "fedavg" else None
                found = ours(work, net, make(work.lr), clients, like, arguments)
                row |= {f"{kind}_{label}_{key}": value for key, value in found.items()}
    return row


def ours(work: Work, module, algorithm, clients, change, arguments) -> dict:
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    made = trainer(work, module, algorithm, clients, arguments)
    start = made.server.w.clone()
    try:
        made.round()
        first = made.server.w.clone()
        made.run(3)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    wait(arguments.device)
    found = {"start_s": round(time.perf_counter() - begun, 1)}
    if change is not None and not has_dropout(module):
        found["apart"] = relative((first - start).float().cpu(), change)
    found["ms"] = round(timed(made.run, arguments.device, arguments.seconds), 3)
    if arguments.device == "cuda":
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if arguments.profile:
            profiled(made, arguments.profile)
    return found


def profiled(made: fl.Trainer, rows: int) -> None:
    """Print which kernels take the time of a round."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        made.run(3)
        torch.cuda.synchronize()
    print(
        seen.key_averages().table(
            sort_by="cuda_time_total", row_limit=rows, max_name_column_width=70
        )
    )


def has_dropout(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Dropout) for part in module.modules())


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(f"{float((found - wanted).norm() / wanted.norm()):.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(WORKS))
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS))
    parser.add_argument("--sides", nargs="*", default=["plain", "ours", "sequence", "jax"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("undrift").setLevel(logging.DEBUG)
    rows = []
    for name in arguments.only:
        row = measure(name, WORKS[name], arguments)
        if "jax" in arguments.sides:
            row |= peer(name, arguments)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            about = {
                "commit": arguments.commit or commit(), "precision": arguments.precision,
                "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
                "torch": torch.__version__,
            }  # fmt: skip
            arguments.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def peer(name: str, arguments) -> dict:
    """Time the same work in JAX, in a process of its own: two libraries share no card's memory."""
    import subprocess
    import sys

    here = Path(__file__).parent / "models_jax.py"
    words = [sys.executable, str(here), name, "--precision", arguments.precision]
    words += ["--seconds", str(arguments.seconds)] + ["--tiny"] * arguments.tiny
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        return {"jax_failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()

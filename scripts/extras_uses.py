"""What each extra is for, used once through undrift's own modules; scripts/extras.py calls it.

python scripts/extras_uses.py NAME       in the current folder, which should be empty
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ["digits", "rounds=2", "partition.clients=4", "sampler.count=2", "work.epochs=1"]


def command(*arguments: str) -> None:
    """Run undrift's own command to its end."""
    from undrift.cli import main

    code = main(list(arguments))
    assert code == 0, f"undrift {' '.join(arguments)} ended with exit code {code}"


def images() -> None:
    """Read a picture."""
    from undrift.sources.pictures import _picture, need_pillow

    file = io.BytesIO()
    need_pillow().new("RGB", (5, 3), (255, 0, 9)).save(file, "PNG")
    assert _picture(file.getvalue(), "red.png").shape == (3, 5, 3)


def plots() -> None:
    """Draw the curves of a comparison, and a partition."""
    command("compare", *TINY, "--seeds", "2", "--algorithms", "fedavg,scaffold", "--out", "runs")
    command("partition", *TINY, "--out", "partition.svg")
    for name in ("runs/curves.png", "runs/curves.svg", "runs/partition.png", "partition.svg"):
        assert Path(name).stat().st_size > 1000, name


def pandas() -> None:
    """Turn a history into a table."""
    import undrift as fl

    [experiment] = fl.load_experiments(TINY[0], TINY[1:])
    assert list(fl.run(experiment, "run").to_pandas().index) == [1, 2]


def parquet() -> None:
    """Train on a table of one's own."""
    import pyarrow
    import pyarrow.parquet

    rows = {"client": [i % 3 for i in range(60)], "x": [i / 60 for i in range(60)]}
    table = pyarrow.table({**rows, "y": [i % 2 for i in range(60)]})
    pyarrow.parquet.write_table(table, "table.parquet")
    command("init", "table.parquet", "--client", "client", "--target", "y")
    command("run", "table.toml", "rounds=2")


def privacy() -> None:
    """Account for what was spent."""
    import undrift as fl

    rule = fl.Private(norm=1.0, noise=1.0, cohort=100)
    assert (
        0
        < fl.spent_on_updates(rule, 10, rate=0.01, population=10**4)
        < fl.spent_on_updates(rule, 10)
    )


def tracked(name: str) -> None:
    """Track a run."""
    command("run", *TINY, "--track", name)
    files = [p for p in Path("runs").rglob("*") if name in str(p) and p.is_file()]
    assert files, f"{name} wrote nothing"


def flower() -> None:
    """Run a federation of two silos over TLS on this machine."""
    from undrift.federated.flower import client_app, server_app

    assert callable(client_app) and callable(server_app)
    command("deploy", "init", "silos", *TINY, "partition.clients=2")
    command("deploy", "try", "silos", "--seconds", "600")


def ray() -> None:
    """Run on two actors."""
    command("run", *TINY, "engine.use=ray", "engine.actors=2")


def rl() -> None:
    """Train an agent, and let it steer."""
    small = ["rounds=12", "episodes=2", "rollouts=1", "batch=4", "evaluation=1"]
    command("train-agent", "digits", *(f"agent.{s}" for s in small), "--out", "agent")
    command("run", *TINY, "algorithm.use=fedrl", "algorithm.policy=agent/policy.safetensors")


def boosting() -> None:
    """Set trees on the pooled table beside a comparison."""
    rows = [f"{'NS'[k % 2]},{k % 7},{'yes' if k % 7 > 3 else 'no'}" for k in range(60)]
    Path("small.csv").write_text("\n".join(["site,x,y", *rows]) + "\n")
    command("init", "small.csv", "--client", "site", "--target", "y")
    command("compare", "small.toml", "rounds=2", "seed=0,1", "--jobs", "1")
    told = json.loads(Path("runs/small/comparison.json").read_text())["baselines"]
    assert [row["kind"] for row in told] == ["always", "alone", "pooled", "boosting"]


def onnx() -> None:
    """Export a model, and predict with the file."""
    import torch

    import undrift as fl

    command("run", *TINY)
    command("export", "runs/digits/fedavg/seed-0", "--to", "digits.onnx")
    found = fl.load_model("digits.onnx")(torch.rand(5, 1, 8, 8))
    assert found.probabilities.shape == (5, 10) and not found.errors


def dev() -> None:
    """Run the tools that `scripts/test` needs, and a test."""
    for tool in ("ruff", "mypy", "build"):
        subprocess.run([sys.executable, "-m", tool, "--version"], check=True)
    test = ["-m", "pytest", "-q", "-n", "2", str(ROOT / "tests" / "core" / "test_tree.py")]
    subprocess.run([sys.executable, *test], check=True, cwd=ROOT)


USES: dict[str, Callable[[], None]] = {
    "images": images,
    "plots": plots,
    "pandas": pandas,
    "parquet": parquet,
    "privacy": privacy,
    "tensorboard": lambda: tracked("tensorboard"),
    "wandb": lambda: tracked("wandb"),
    "flower": flower,
    "ray": ray,
    "rl": rl,
    "onnx": onnx,
    "boosting": boosting,
    "mlflow": lambda: tracked("mlflow"),
    "dev": dev,
}

if __name__ == "__main__":
    USES[sys.argv[1]]()

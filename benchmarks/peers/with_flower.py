"""Flower's simulation engine (Ray actors): https://github.com/adap/flower"""

from __future__ import annotations

import os
from collections.abc import Callable

from works import Job, Weights, main

# before flwr is loaded: it would report every run, and look for updates
os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1")

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch_model import arrays, build, held, train


def make_client(job: Job) -> ClientApp:
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        net, data = held(job)
        x, y = data[int(context.node_config["partition-id"])]
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(net, job, x, y)
        content = RecordDict(
            {
                "arrays": ArrayRecord(net.state_dict()),
                "metrics": MetricRecord({"num-examples": len(x)}),
            }
        )
        return Message(content=content, reply_to=message)

    return app


def run(job: Job, mark: Callable[[], None]) -> Weights:
    net, server = build(job), ServerApp()

    @server.main()
    def drive(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=job.work.cohort / job.work.clients,
            fraction_evaluate=0.0,
            min_available_nodes=job.work.clients,
        )
        start = ArrayRecord(net.state_dict())
        # called before the first round and after each
        result = strategy.start(grid, start, job.rounds, evaluate_fn=lambda *_: mark())
        net.load_state_dict(result.arrays.to_torch_state_dict())

    # one actor per core with one thread each, or one actor with all threads
    resources = {"num_cpus": job.threads, "num_gpus": 0.0}
    run_simulation(
        server,
        make_client(job),
        num_supernodes=job.work.clients,
        backend_config={
            "client_resources": resources,
            "init_args": {"num_cpus": os.cpu_count(), "include_dashboard": False},
        },
    )
    return arrays(net)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(
        run,
        ["flwr", "ray", "torch", "numpy"],
        "FedAvg strategy in the simulation runtime; as many Ray actors as cores divided by "
        "threads; the clients' code is the hand-written loop",
    )

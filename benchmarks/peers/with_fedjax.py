"""FedJAX: https://github.com/google/fedjax"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from works import LR, Conv, Job, Linear, Weights, main, start

Params = dict[str, dict[str, Any]]


def limit_threads(threads: int) -> None:
    """XLA makes one thread per core it may run on; it must be told before JAX is loaded."""
    if threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def flattened_pixels(job: Job) -> dict[int, tuple[int, int]]:
    """Find the linear layers behind a flatten: (channels, pixels) of what they read."""
    found, channels = {}, 0
    for place, layer in enumerate(job.work.layers):
        if isinstance(layer, Conv):
            channels = layer.outputs
        elif isinstance(layer, Linear):
            if channels:
                found[place] = (channels, layer.inputs // channels)
            channels = 0
    return found


def to_params(job: Job, weights: Weights) -> Params:
    """Turn torch's layouts into JAX's: channels last, inputs first."""
    params: Params = {}
    flat = flattened_pixels(job)
    for place, layer in enumerate(job.work.layers):
        if isinstance(layer, str):
            continue
        w, b = (weights[f"{place}.{name}"] for name in ("weight", "bias"))
        if place in flat:
            w = w.reshape(len(w), *flat[place]).transpose(0, 2, 1).reshape(w.shape)
        w = w.transpose(2, 3, 1, 0) if isinstance(layer, Conv) else w.T
        params[f"layer_{place}"] = {"w": w, "b": b}
    return params


def to_weights(job: Job, params: Params) -> Weights:
    weights: Weights = {}
    flat = flattened_pixels(job)
    for name, one in params.items():
        place, w = int(name.split("_")[1]), np.asarray(one["w"])
        w = w.transpose(3, 2, 0, 1) if w.ndim == 4 else w.T
        if place in flat:
            channels, pixels = flat[place]
            w = w.reshape(len(w), pixels, channels).transpose(0, 2, 1).reshape(w.shape)
        weights[f"{place}.weight"], weights[f"{place}.bias"] = w, np.asarray(one["b"])
    return weights


def make_grad(job: Job) -> Any:
    import fedjax
    import haiku as hk
    import jax
    import jax.numpy as jnp

    def forward(batch: dict[str, Any]) -> Any:
        out = batch["x"]
        for place, layer in enumerate(job.work.layers):
            if isinstance(layer, Conv):
                convolution = hk.Conv2D(
                    layer.outputs, layer.kernel, padding="VALID", name=f"layer_{place}"
                )
                out = convolution(out)
            elif isinstance(layer, Linear):
                out = hk.Linear(layer.outputs, name=f"layer_{place}")(out)
            elif layer == "pool":
                out = hk.max_pool(out, (2, 2, 1), (2, 2, 1), "VALID")
            else:
                out = jax.nn.relu(out) if layer == "relu" else hk.Flatten()(out)
        return out

    def loss(batch: dict[str, Any], out: Any) -> Any:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(out), batch["y"][:, None], 1)
        return -chosen[:, 0]

    shape = job.work.shape if len(job.work.shape) == 1 else (*job.work.shape[1:], job.work.shape[0])
    sample = {"x": np.zeros((1, *shape), np.float32), "y": np.zeros(1, np.int32)}
    model = fedjax.create_model_from_haiku(hk.transform(forward), sample, loss)
    return fedjax.model_grad(model)


def make_clients(job: Job) -> Any:
    import fedjax

    def dataset(x: np.ndarray, y: np.ndarray) -> Any:
        x = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if x.ndim == 4 else x
        return fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)})

    named = {b"%06d" % i: dataset(x, y) for i, (x, y) in enumerate(job.clients())}
    return {name: one.all_examples() for name, one in named.items()}


def run(job: Job, mark: Callable[[], None]) -> Weights:
    limit_threads(job.threads)
    import fedjax
    import jax

    # FedJAX 0.0.17 calls it by the name it had until JAX 0.6
    jax.tree_map = getattr(jax, "tree_map", jax.tree_util.tree_map)
    data = fedjax.InMemoryFederatedData(make_clients(job))
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, job.work.cohort, seed=0)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        make_grad(job),
        client_optimizer=fedjax.optimizers.sgd(LR),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            batch_size=job.work.batch, num_epochs=1, skip_shuffle=job.check
        ),
    )
    state = algorithm.init(
        jax.tree_util.tree_map(jax.numpy.asarray, to_params(job, start(job.work)))
    )
    mark()
    for _ in range(job.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        mark()
    return to_weights(job, state.params)


if __name__ == "__main__":
    main(
        run,
        ["fedjax", "jax", "jaxlib", "dm-haiku", "numpy"],
        "fed_avg with its default backend (one jitted step per batch), channels last",
    )

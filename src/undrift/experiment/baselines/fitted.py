"""The baselines themselves: a constant answer, and models trained without a federation.

Letters: n examples of an exam, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.core.losses import Pinball
from undrift.core.task import Buffers, Task, Vec
from undrift.data import Everyone, Federation, Work
from undrift.experiment.baselines.scene import Answer, Scene
from undrift.experiment.exam import Exam, Paper
from undrift.experiment.sections import EngineSettings, Evaluation
from undrift.experiment.spec import Experiment
from undrift.experiment.world import make_task, resident_of, trainer_of
from undrift.fleet import Fleet, parted
from undrift.trainer import Trainer

SMALLEST = torch.finfo(torch.float32).tiny  # a share or mean of 0 has a logarithm, too


# -------------------------------------------------------------------------------------- constant
def constant(scene: Scene) -> tuple[str, dict[str, Answer]]:
    """Always answer the same: the classes' shares among training targets, or their middle."""
    label, one = _shares(scene) if scene.meaning.kind == "classes" else _middle(scene)
    one = one.to(scene.task.dtype)
    sizes = {name: len(paper.y) for name, paper in scene.papers.items()}
    return label, {n: Answer(one.expand(size, *one.shape)) for n, size in sizes.items()}


def _shares(scene: Scene) -> tuple[str, Tensor]:
    """Give logarithms of the shares [C]: softmax makes the shares of them."""
    count = torch.bincount(scene.y[scene.rows], minlength=scene.meaning.classes).double()
    first = int(count.argmax())
    names = scene.meaning.names
    name = names[first] if first < len(names) else str(first)
    return f"always {name!r}", (count / count.sum()).clamp(min=SMALLEST).log()


def _middle(scene: Scene) -> tuple[str, Tensor]:
    """Give the constant that the loss likes best: mean, median or quantile, each output's own."""
    y = scene.y[scene.rows].double()
    loss, name = scene.task.loss, scene.task.loss_name
    if isinstance(loss, Pinball) or name == "pinball":
        share = scene.meaning.quantile
        return f"always the {share:g} quantile", _quantile(y, share)
    if name == "mae":
        return "always the median", _quantile(y, 0.5)
    mean = y.mean(0)
    return "always the mean", mean.clamp(min=SMALLEST).log() if scene.meaning.log else mean


def _quantile(y: Tensor, share: float) -> Tensor:
    """Interpolate between neighbours; torch's own function takes 16 million values at most."""
    ordered = y.sort(0).values
    place = share * (len(y) - 1)
    low = int(place)
    high = min(low + 1, len(y) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)


# --------------------------------------------------------------------------------------- trained
def alone(scene: Scene) -> dict[str, Answer]:
    """Let each site's own model answer for the site's own examples."""
    owners = {n: o for n in scene.papers if (o := scene.owner(n)) is not None}
    judged = sorted({int(i) for o in owners.values() for i in o.unique() if i >= 0})
    parts = [torch.from_numpy(scene.dealt.parts[i]) for i in judged]
    models = _trained(scene, parts, scene.experiment.work)
    found = {}
    for name, owner in owners.items():
        rows, outputs = [], []
        for site, model in zip(judged, models, strict=True):
            own = (owner == site).nonzero()[:, 0]
            if len(own):
                rows.append(own)
                outputs.append(_outputs(scene, model, scene.papers[name], own))
        if rows:
            found[name] = Answer(torch.cat(outputs), torch.cat(rows))
    return found


def pooled(scene: Scene) -> dict[str, Answer]:
    """Train one model on the examples of all clients."""
    work = pooled_work(scene.experiment.work, len(scene.dealt.parts))
    (model,) = _trained(scene, [scene.rows], work)
    return {name: Answer(_outputs(scene, model, p)) for name, p in scene.papers.items()}


def pooled_work(work: Work, clients: int) -> Work:
    """Let one client pass over all examples as often as the clients pass over their own.

    >>> pooled_work(Work(steps=(1, 5), batch=8), 12)
    Work(epochs=None, steps=(12, 60), batch=8, last='keep')
    """
    if not isinstance(work, Work) or work.steps is None or work.slots is None:
        return work
    steps = work.steps
    many = clients * steps if isinstance(steps, int) else (clients * steps[0], clients * steps[1])
    return replace(work, steps=many)


def _trained(scene: Scene, parts: Sequence[Tensor], work: Work) -> list[tuple[Task, Vec, Buffers]]:
    """Train a model on each of several sets of examples, for as many rounds as a run has."""
    made = _without_federation(scene.experiment, work)
    tasks = _tasks(scene, parts)
    examples = resident_of(made, scene.dealt.examples, scene.task)
    x, y = examples.train_x, scene.y.to(examples.train_y.device)
    pairs = zip(tasks, parts, strict=True)
    trainers = [trainer_of(made, task, Federation.split(x, y, [rows])) for task, rows in pairs]
    on_cpu = all(t.engine.device.type == "cpu" for t in trainers)
    # on a CPU plain steps are loops in C, which a batch of several trainers does without
    for batch in [[t] for t in trainers] if on_cpu else parted(trainers):
        _run(batch, made.rounds)
    return [(t.task, t.server.w, t.server.buffers) for t in trainers]


def _run(batch: Sequence[Trainer], rounds: int) -> None:
    if len(batch) > 1:
        Fleet(batch).run(rounds)
    else:
        batch[0].run(rounds)


def _without_federation(experiment: Experiment, work: Work) -> Experiment:
    """Keep model, work and local optimizer; nothing is corrected, and nobody is left out."""
    engine = experiment.engine
    if engine.use == "ray":
        engine = EngineSettings(device=engine.device)
    return replace(
        experiment,
        algorithm=Algorithm(local=experiment.algorithm.local),
        work=work,
        sampler=Everyone(),
        arrival=None,
        evaluate=Evaluation(batch=experiment.evaluate.batch),
        engine=replace(engine, state="device", private_key=None),
    )


def _tasks(scene: Scene, parts: Sequence[Tensor]) -> list[Task]:
    """Make a task for each; balanced class weights are those of its own targets."""
    if scene.experiment.task.class_weights != "balanced":
        return [scene.task] * len(parts)
    examples = scene.dealt.examples
    return [make_task(scene.experiment, examples, scene.y[rows]) for rows in parts]


@torch.no_grad()
def _outputs(
    scene: Scene, model: tuple[Task, Vec, Buffers], paper: Paper, rows: Tensor | None = None
) -> Tensor:
    """Let a model answer, on the host."""
    task, w, buffers = model
    x, y = paper.x, paper.y
    if rows is not None:
        x, y = x[rows.to(x.device)], y[rows.to(y.device)]
    exam = Exam(task, Paper(x, y), w.device, scene.experiment.evaluate.batch)
    return exam.outputs(w, buffers)

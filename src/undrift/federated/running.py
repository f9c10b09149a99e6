"""A deployed run: the loop of every run, around a coordinator instead of a trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from undrift.errors import EmptyRoundError
from undrift.experiment.blueprint import files_of
from undrift.experiment.events import Listener
from undrift.experiment.exams import exams_of, papers_of, sites_of
from undrift.experiment.folder import RunFolder
from undrift.experiment.history import History
from undrift.experiment.losses import meaning_of
from undrift.experiment.measure import Measure
from undrift.experiment.session import Job, Session, has_more, info_of, train
from undrift.experiment.tables import Table
from undrift.experiment.world import Dealt, deal
from undrift.federated.enrol import Record, again, enrol, read_record, write_record
from undrift.federated.exchange import RefusalLog
from undrift.federated.grid import Grid
from undrift.federated.project import Project
from undrift.federated.server import Coordinator, new_run
from undrift.federated.tables import Tables
from undrift.interrupts import Shield
from undrift.rounds import Advance
from undrift.sources.examples import Examples
from undrift.state import disk
from undrift.tabular.holders import experiments_rows
from undrift.trainer import Trainer

MEMBERS, REFUSED, CHECKED = "members.json", "refused.jsonl", "checked.json"
CHECK_SECONDS = 45.0  # for everybody to answer a greeting


class DeployedJob(Job):
    """An experiment whose clients are elsewhere."""

    def __init__(self, project: Project, grid: Grid, folder: Path) -> None:
        self.project, self.grid, self.folder = project, grid, folder
        experiment = project.experiment
        self.name, self.label = experiment.name, experiment.label
        self.seed, self.rounds = experiment.seed_number, experiment.rounds
        self.tables: Tables | None = None  # where silos hold tables

    def table(self) -> Table:
        """Give everything that decides the run: the same file as in a simulation."""
        return self.project.experiment.to_table()

    def start(self, state_path: Path | None) -> tuple[Trainer, Measure]:
        """Wait for the clients, and make the server."""
        refusals = RefusalLog(self.folder / REFUSED, self.project.names)
        run, members = self._members(refusals)
        project, plan = self.project, self.project.plan
        experiment = project.experiment
        blank, task = project.blank(), project.task()
        self.kept = files_of(experiment, blank, task, project.clients, sum(members.sizes.values()))
        coordinator = Coordinator(
            task,
            experiment.algorithm,
            self.grid,
            members,
            project.example,
            run=run,
            plan=plan,
            work=experiment.work,
            sampler=experiment.sampler,
            seed=experiment.seeds,
            arrival=experiment.arrival,
            limits=project.limits,
            patience=project.patience,
            refusals=refusals,
        )
        return coordinator, self._measure(coordinator)

    def _members(self, refusals: RefusalLog) -> Record:
        """Find who takes part; over tables, agree on how they become numbers."""
        project, path = self.project, self.folder / MEMBERS
        known, asked = read_record(path), (project.door, project.plan)
        if known is None:
            run, limits = new_run(), project.limits
            members = enrol(self.grid, project.door, run, project.plan, limits, refusals)
        else:
            run, members = known.run, again(self.grid, asked[0], known, asked[1], refusals)
        record = Record(run, members)
        if project.asked is not None:
            self.tables = Tables(project, self.grid, self.folder, record, refusals)
            record, made = (
                self.tables.agree() if known is None else (record, self.tables.remember())
            )
            self.project = project.prepared(made)
        if known is None:
            write_record(path, record)  # now: what was agreed on before is there
        if self.tables is not None:
            self.tables.hand_out(made)
        return record

    def advance(self, trainer: Trainer) -> Advance:
        """Train a round."""
        if self.tables is not None and self.project.preparation is not None:
            self.tables.renew(self.project.preparation)
        return trainer.advance()

    def finish(self) -> None:
        """Give the model of a complete run to those that trained it on their tables."""
        known = read_record(self.folder / MEMBERS)
        if self.tables is None and self.project.asked is not None and known is not None:
            refusals = RefusalLog(self.folder / REFUSED, self.project.names)
            self.tables = Tables(self.project, self.grid, self.folder, known, refusals)
        if self.tables is not None:
            self.tables.hand_out_model()

    def _examined(self) -> tuple[Examples, Dealt]:
        """Give the test examples that the server has, and whose they are."""
        dealt, project = deal(self.project.experiment), self.project
        if project.asked is None or project.preparation is None:
            return dealt.examples, dealt
        made, rows = project.preparation, experiments_rows(project.asked).test
        x, y = torch.from_numpy(made.encode(rows)), made.encode_target(rows)
        return replace(project.blank(), test_x=x, test_y=y), dealt

    def _measure(self, coordinator: Coordinator) -> Measure:
        settings = self.project.experiment
        if not self.project.judge:
            return Measure(coordinator, settings.evaluate, {})
        examples, dealt = self._examined()
        y = examples.test_x.flatten(1) if settings.task.target == "input" else examples.test_y
        task, evaluate = coordinator.task, settings.evaluate
        meaning = meaning_of(settings, examples, task)
        papers = papers_of(evaluate, dealt, examples, (examples.train_y, y))
        exams = exams_of(task, papers, evaluate, meaning, coordinator.engine.device)
        return Measure(coordinator, evaluate, exams, meaning, sites_of(dealt, papers))


def run_deployed(
    project: Project, grid: Grid, folder: Path | str, listeners: Sequence[Listener] = ()
) -> History:
    """Run to the end over a grid, or go on where the last server stopped; saved after every round.

    The folder is like a simulation's, with `members.json` and `refused.jsonl` beside; over tables
    with `preparation.json`, which the nodes agree on by sums before the first round.
    """
    place = RunFolder(folder)
    job = DeployedJob(project, grid, place.path)
    info = info_of(job, place.path)
    table = dict(info.experiment)
    place.check(table)  # a folder of others does not even get a lock
    with place.locked():
        place.check(table)
        history = place.history()
        if has_more(job, place, history):
            if place.table() is None:
                place.begin(table)  # before members.json: it says whose that is
            session = Session(job, place, info, listeners, 0.0)
            with Shield(lambda: session.torn) as shield:
                with session.kept():
                    while session.left:
                        train([session], lambda: [job.advance(session.trainer)], 1)
                        shield.release()
                history = session.close()
        job.finish()
    for listener in listeners:
        listener.finished(info, history)
    _check_whole(history, place, project.patience.minimum)
    return history


def _check_whole(history: History, place: RunFolder, minimum: int) -> None:
    """Refuse to call a run complete whose rounds did not all count."""
    empty = history.empty_rounds()
    if empty:
        names = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise EmptyRoundError(
            f"{len(empty)} of {len(history)} rounds ({names}) had fewer than {minimum} reports and "
            f"changed nothing; {place.path / REFUSED} tells why. The model of the others is kept"
        )


def check_deployed(project: Project, grid: Grid, folder: Path | str) -> None:
    """Greet everybody once and write down who answered, and who was refused and why."""
    refusals = RefusalLog()
    door = project.door._replace(minimum=0, seconds=CHECK_SECONDS)
    members = enrol(grid, door, new_run(), project.plan, project.limits, refusals)
    told = {
        "clients": project.clients,
        "sizes": {str(c): n for c, n in sorted(members.sizes.items())},
        "refused": [[error.client, error.cause] for error in refusals.refused],
        "strangers": [str(n) for n, c in grid.nodes().items() if c is None and project.keys],
    }
    disk.make_directory(Path(folder))
    disk.write_atomically(Path(folder) / CHECKED, [json.dumps(told).encode()])

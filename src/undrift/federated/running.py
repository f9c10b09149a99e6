"""A deployed run: the loop of every run, around a coordinator instead of a trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from undrift.errors import EmptyRoundError
from undrift.experiment.blueprint import files_of
from undrift.experiment.events import Listener
from undrift.experiment.exam import Paper
from undrift.experiment.exams import exams_of
from undrift.experiment.folder import RunFolder
from undrift.experiment.history import History
from undrift.experiment.losses import meaning_of
from undrift.experiment.measure import Measure
from undrift.experiment.session import Job, Session, has_more, info_of, train
from undrift.experiment.tables import Table
from undrift.experiment.world import examples_of
from undrift.federated.enrol import Record, again, enrol, read_record, write_record
from undrift.federated.exchange import RefusalLog
from undrift.federated.grid import Grid
from undrift.federated.project import Project
from undrift.federated.server import Coordinator, new_run
from undrift.interrupts import Shield
from undrift.state import disk
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

    def table(self) -> Table:
        """Give everything that decides the run: the same file as in a simulation."""
        return self.project.experiment.to_table()

    def start(self, state_path: Path | None) -> tuple[Trainer, Measure]:
        """Wait for the clients, and make the server."""
        project, refusals = self.project, RefusalLog(self.folder / REFUSED)
        record = read_record(self.folder / MEMBERS)
        door, plan = project.door, project.plan
        if record is None:
            run = new_run()
            members = enrol(self.grid, door, run, plan, project.limits, refusals)
            write_record(self.folder / MEMBERS, Record(run, members))
        else:
            run, members = record.run, again(self.grid, door, record, plan, refusals)
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

    def _measure(self, coordinator: Coordinator) -> Measure:
        settings = self.project.experiment
        if not self.project.judge:
            return Measure(coordinator, settings.evaluate, {})
        examples = examples_of(settings)
        y = examples.test_x.flatten(1) if settings.task.target == "input" else examples.test_y
        paper = Paper(examples.test_x, y)
        task, evaluate = coordinator.task, settings.evaluate
        meaning, papers = meaning_of(settings, examples, task), {"test": paper}
        exams = exams_of(task, papers, evaluate, meaning, coordinator.engine.device)
        return Measure(coordinator, evaluate, exams, meaning)


def run_deployed(
    project: Project, grid: Grid, folder: Path | str, listeners: Sequence[Listener] = ()
) -> History:
    """Run to the end over a grid, or go on where the last server stopped; saved after every round.

    The folder is like a simulation's, with `members.json` and `refused.jsonl` beside.
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
                        train([session], lambda: [session.trainer.advance()], 1)
                        shield.release()
                history = session.close()
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

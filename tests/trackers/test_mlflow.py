"""MLflow: what its own client finds in the store."""

import math
import warnings

import pytest

pytest.importorskip("sqlalchemy")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mlflow = pytest.importorskip("mlflow")

from undrift.trackers.mlflow import METRICS

# MLflow has not yet followed what SQLAlchemy, pydantic and Python deprecate.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """An empty store: setting one up takes MLflow seconds."""
    place = tmp_path_factory.mktemp("store") / "mlflow.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.MlflowClient(tracking_uri=f"sqlite:///{place}").search_experiments()
    return place.read_bytes()


@pytest.fixture
def store(story, prepared):
    place = story.folder / "mlflow" / "mlflow.db"
    place.parent.mkdir(parents=True)
    place.write_bytes(prepared)
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{place}")


def runs_in(store):
    found = store.get_experiment_by_name("digits")
    return store.search_runs([found.experiment_id])


def curve(store, run, name="test_accuracy"):
    return [
        (m.step, pytest.approx(m.value)) for m in store.get_metric_history(run.info.run_id, name)
    ]


def accuracies(first, last):
    return [(number, 0.1 * number) for number in range(first, last + 1)]


def test_every_number_is_there_with_its_round(story, store):
    story.tell(story.open("mlflow"), story.run(), [], story.records(1, 6))
    (run,) = runs_in(store)
    assert curve(store, run) == accuracies(1, 6)
    assert math.isnan(store.get_metric_history(run.info.run_id, "train_loss")[1].value)
    assert run.info.run_name == "scaffold/seed-1"
    assert run.info.status == "FINISHED"
    assert run.info.artifact_uri.startswith((story.folder / "mlflow").as_uri())


def test_settings_are_parameters_of_the_allowed_length(story, store):
    story.tell(story.open("mlflow"), story.run(), [], story.records(1, 6))
    parameters = runs_in(store)[0].data.params
    assert parameters["algorithm.lr"] == "0.1"
    assert parameters["seeds"] == "[1, 2]"
    assert parameters["note"] == "x" * 500


def test_names_that_mlflow_refuses_are_changed(story, store):
    records = [{"round": 1, "test_é/σ²(x)": 1.0}]
    odd = story.run()._replace(experiment={f"k{i}!": i for i in range(250)})
    story.tell(story.open("mlflow"), odd, [], records)
    (run,) = runs_in(store)
    assert len(run.data.params) == 250
    assert len(run.data.metrics) == 2


def test_a_resumed_run_goes_on_in_the_same_one(story, store):
    story.tell(story.open("mlflow"), story.run(), [], story.records(1, 3), KeyboardInterrupt())
    (run,) = runs_in(store)
    assert run.info.status == "KILLED"
    tracker = story.open("mlflow")
    story.tell(tracker, story.run(), story.records(1, 3), story.records(4, 5), end=None)
    assert runs_in(store)[0].info.status == "RUNNING"
    tracker.finished(story.run(), [])
    (run,) = runs_in(store)
    assert run.info.status == "FINISHED"
    assert curve(store, run) == accuracies(1, 5)


def test_rounds_that_were_cut_off_are_not_logged_twice(story, store):
    story.tell(story.open("mlflow"), story.run(), [], story.records(1, 5), ValueError("no"))
    assert runs_in(store)[0].info.status == "FAILED"
    story.tell(story.open("mlflow"), story.run(), story.records(1, 2), story.records(3, 6))
    (run,) = runs_in(store)
    assert curve(store, run) == accuracies(1, 6)


def test_rounds_that_mlflow_has_not_seen_are_added(story, store):
    story.tell(story.open("mlflow"), story.run(), [], story.records(1, 2), ValueError("no"))
    story.tell(story.open("mlflow"), story.run(), story.records(1, 4), story.records(5, 6))
    (run,) = runs_in(store)
    assert curve(store, run) == accuracies(1, 6)


def test_another_store_gets_the_whole_run(story, store, monkeypatch, prepared, tmp_path):
    story.tell(story.open("mlflow"), story.run(), [], story.records(1, 3), ValueError("no"))
    (tmp_path / "other.db").write_bytes(prepared)
    uri = f"sqlite:///{tmp_path / 'other.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    story.tell(story.open("mlflow"), story.run(), story.records(1, 3), story.records(4, 6))
    (run,) = runs_in(mlflow.MlflowClient(tracking_uri=uri))
    assert curve(mlflow.MlflowClient(tracking_uri=uri), run) == accuracies(1, 6)


def test_a_run_that_starts_anew_is_a_new_one(story, store):
    for _ in range(2):
        story.tell(story.open("mlflow"), story.run(), [], story.records(1, 2))
    assert len(runs_in(store)) == 2


def test_runs_that_interleave_are_kept_apart(story, store):
    tracker = story.open("mlflow")
    runs = [story.run(seed=seed) for seed in (1, 2)]
    for run in runs:
        tracker.started(run, [])
    for record in story.records(1, 4):
        for run in runs:
            tracker.round(run, record)
    tracker.finished(runs[0], [])
    tracker.close()
    found = {run.info.run_name: run for run in runs_in(store)}
    assert {name: run.info.status for name, run in found.items()} == {
        "scaffold/seed-1": "FINISHED",
        "scaffold/seed-2": "KILLED",
    }
    assert all(curve(store, run) == accuracies(1, 4) for run in found.values())


def test_more_numbers_than_mlflow_takes_at_once_are_all_there(story, store):
    many = [{"round": n} | {f"m{i}": float(n) for i in range(600)} for n in (1, 2, 3)]
    story.tell(story.open("mlflow"), story.run(), [], many)
    (run,) = runs_in(store)
    assert 600 < METRICS < 3 * 600
    assert run.data.metrics["m599"] == 3.0


def test_a_store_that_breaks_stops_the_tracker_and_nothing_else(story, store, caplog):
    tracker = story.open("mlflow")
    tracker.started(story.run(), [])
    caplog.clear()
    database = story.folder / "mlflow" / "mlflow.db"
    database.write_bytes(b"not a database" * 1000)
    for record in story.records(1, 6):
        tracker.round(story.run(), record)
    tracker.finished(story.run(), [])
    told = [record for record in caplog.records if record.name == "undrift"]
    assert len(told) == 1


def test_setting_up_the_store_is_silent(story, capfd):
    story.tell(story.open("mlflow"), story.run(), [], story.records(1, 2))
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""

"""What MLflow stores of a run, read with its client."""

from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from hdet.integrations.mlflow import MlflowSink
from hdet.records.codec import as_line
from hdet.records.events import CycleEvent, KnobEntry
from tests.integrations.features import RECORDS
from tests.integrations.tracked import Points, differing, stored_of, train


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mlflow.MlflowClient]:
    """A client of a store of files: that of mlflow-skinny needs no further package."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"file:{tmp_path}/runs")
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(None)


def points(client: mlflow.MlflowClient, run_id: str) -> Points:
    names = client.get_run(run_id).data.metrics
    return stored_of(
        [(n, m.step, m.value) for n in names for m in client.get_metric_history(run_id, n)]
    )


def runs(client: mlflow.MlflowClient) -> list[mlflow.entities.Run]:
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


@pytest.mark.works("MLflow", RECORDS)
def test_mlflow_stores_metrics_tags_texts_and_the_report(client: mlflow.MlflowClient) -> None:
    sink = MlflowSink(run_name="small")
    assert runs(client) == []  # other processes make a sink as well
    events = train(sink)
    assert mlflow.active_run() is None
    (run,) = runs(client)
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    stored = points(client, run.info.run_id)
    assert not differing(stored, events.points())
    assert len(stored["hdet/lr/group0/centre"]) == 5
    scout, guard, note = events.texts()
    assert run.data.tags["hdet.scout"].startswith(f"step 3: {scout}")
    assert run.data.tags["hdet.guard"] == f"step 100: {guard}"
    texts = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/hdet/events.txt").splitlines()
    assert texts == [run.data.tags["hdet.scout"], f"step 100: {guard}", f"step 100: {note}"]
    files = {file.path for file in client.list_artifacts(run.info.run_id, "hdet")}
    assert files == {"hdet/events.txt", "hdet/record.jsonl", "hdet/report.html"}


@pytest.mark.integrations
def test_mlflow_logs_to_the_run_of_the_trainer_and_leaves_it_open(
    client: mlflow.MlflowClient,
) -> None:
    with mlflow.start_run() as begun:
        train(MlflowSink())
        active = mlflow.active_run()
        assert active is not None and active.info.run_id == begun.info.run_id
    (run,) = runs(client)
    assert "hdet/lr/group0/replica7" in points(client, run.info.run_id)


def test_mlflow_takes_groups_with_any_name(client: mlflow.MlflowClient) -> None:
    sink = MlflowSink()
    knobs = (KnobEntry(name="layer[0]; x", is_lr=True, values=(0.1,), centre=0.1),)
    sink.write(as_line(CycleEvent(step=1, cycle=0, losses=(0.5,), knobs=knobs)))
    sink.close()
    (run,) = runs(client)
    assert "hdet/lr/layer_0__ x/replica0" in points(client, run.info.run_id)


@pytest.mark.integrations
def test_run_goes_on_where_mlflow_fails(client: mlflow.MlflowClient) -> None:
    mlflow.set_tracking_uri("nowhere://runs")
    with pytest.warns(UserWarning, match="record MlflowSink failed") as seen:
        events = train(MlflowSink())
    assert len(seen) == 1
    assert len(events.of("cycle")) == 5

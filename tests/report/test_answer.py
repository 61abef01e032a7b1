"""The paragraph at the top of a report, and the reference that a report draws."""

from pathlib import Path

from hdet.records.reader import read
from hdet.records.reference import Reference, read_reference
from hdet.report.answer import answer
from hdet.report.figures import comparison
from hdet.report.figures.curves import reference_band
from tests.sample_record import Sample, write_lines, write_sample

REFERENCE = Reference(
    name="digits", text="best of a sweep", runs=9, bands={"loss": (0.3, 0.4), "accuracy": (0.9, 1)}
)


def searched(folder: Path, **changes: object) -> str:
    sample = Sample(scouted=True, cycles=10, knobs=("group0",))
    found = {"factor": 4.0, "within": 2.1, "shares": {"prior": 0.3, "gains": 0.7}}
    lines = [
        line | found | changes if line["event"] == "scout" else line for line in sample.lines()
    ]
    return answer(read(write_lines(folder, lines)))


def test_answer_says_given_found_how_sure_why_and_the_cost(tmp_path: Path) -> None:
    text = searched(tmp_path / "a")
    assert text.startswith(
        "Given a learning rate of 1e-3, the scout found 4e-3, 4 times the given one. The best one "
        "probably lies within a factor of 2.1 of it, judged by what short rounds gained (70%), "
        "what is usual for this optimizer (30%). The search took 12 of 250 steps (4.8%)."
    )
    assert text.endswith(
        "The guard went back to earlier weights once; the ceiling left 0.5 times the learning rate."
    )


def test_answer_of_an_unfinished_search_says_so(tmp_path: Path) -> None:
    assert "The search had not ended at step 12." in searched(tmp_path / "a", factor=None)


def test_answer_without_how_sure_gives_the_reason(tmp_path: Path) -> None:
    text = searched(tmp_path / "a", within=None, factor_reason="it gained most")
    assert "Why: it gained most." in text


def test_answer_of_a_run_without_search_says_so(tmp_path: Path) -> None:
    text = answer(read(write_sample(tmp_path / "a")))
    assert text.startswith("No search: 4 replicas explored around the given learning rate")


def test_answer_compares_with_the_reference_beside_the_record(tmp_path: Path) -> None:
    folder = write_sample(tmp_path / "a")
    REFERENCE.write(folder)
    history = read(folder)
    assert history.reference == REFERENCE
    assert answer(history).endswith("best of a sweep: 0.3 to 0.4.")


def test_reference_is_drawn_as_a_band_over_all_steps(tmp_path: Path) -> None:
    folder = write_sample(tmp_path / "a")
    REFERENCE.write(folder)
    band = reference_band([read(folder)], "loss")
    assert band is not None
    assert set(band.trace["y"]) == {0.3, 0.4}
    assert max(band.trace["x"]) == 1000
    assert reference_band([read(folder)], "other") is None
    other = read(write_sample(tmp_path / "b"))
    assert reference_band([read(folder), other], "loss") is None


def test_damaged_reference_is_left_out(tmp_path: Path) -> None:
    for text in ("", "[]", '{"name": 1}', '{"name": "a", "text": "b", "bands": {"loss": [2, 1]}}'):
        (tmp_path / "reference.json").write_text(text)
        assert read_reference(tmp_path) is None


def test_accuracy_never_gets_a_log_axis(tmp_path: Path) -> None:
    lines = list(Sample(cycles=10).lines())
    for place, line in enumerate(line for line in lines if line["event"] == "note"):
        line["measures"] = {"accuracy": 0.05 + 0.9 * place, "other_loss": 10.0 ** (2 * place)}
    history = read(write_lines(tmp_path / "a", lines))
    accuracy = comparison.measure([("", history)], "accuracy")
    loss = comparison.measure([("", history)], "other_loss")
    assert accuracy is not None
    assert loss is not None
    assert accuracy.layout["yaxis"]["type"] == "linear"
    assert loss.layout["yaxis"]["type"] == "log"

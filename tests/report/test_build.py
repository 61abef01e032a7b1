"""The report as a file: what is on it, in which words, and what cannot get into it."""

import importlib
import json
import random
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hdet.records.history import History
from hdet.records.reader import read
from hdet.report import build as report
from hdet.report.html_page import PALETTES, plotly_script
from hdet.report.plotly import known
from tests.knob_run import steered
from tests.sample_record import Sample, write_hostile, write_lines, write_sample

graph_objects = importlib.import_module("plotly.graph_objects")


def page_of(*runs: Path) -> str:
    return report.render([read(run) for run in runs])


def body_of(page: str) -> str:
    return page[page.index("<body>") : page.index("<script>")]


def plots_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', page, re.S)
    assert found
    plots: list[dict[str, Any]] = json.loads(found[1])
    return plots


def titles_of(page: str) -> list[str]:
    return re.findall(r"<figure[^>]*><h3>(.*?)</h3>", page)


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a plot that plotly may read as markup."""
    if isinstance(value, dict):
        for entry in value.values():
            yield from texts_of(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from texts_of(entry)
    elif isinstance(value, str):
        yield value


def painted(value: Any) -> Any:
    """A plot with its named colours filled in."""
    if isinstance(value, dict):
        return {key: painted(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [painted(entry) for entry in value]
    return "#123456" if isinstance(value, str) and re.match(r"@\w+(/[\d.]+)?$", value) else value


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    return write_hostile(tmp_path / "<b>run<img src=x>")


def test_page_of_a_run_has_all_sections(tmp_path: Path) -> None:
    page = page_of(write_sample(tmp_path / "a", cycles=20, total_cycles=30, excluded={3: 2}))
    body = body_of(page)
    for part in ("unfinished: step 500 of 750", "2.13.0", "controller.kind", "evaluated the"):
        assert part in body
    assert titles_of(page) == [
        "Loss of every replica and of the consensus",
        "Learning rate: embedding",
        "Hypergradient: embedding",
        "Learning rate: blocks",
        "Hypergradient: blocks",
        "accuracy",
        "Distance before each converge",
        "Excluded replicas",
        "Cost of converging",
    ]


def test_curves_have_the_numbers_of_the_record(tmp_path: Path) -> None:
    run = write_sample(tmp_path / "a", cycles=20)
    results, plots = read(run), plots_of(page_of(run))
    loss = {trace["name"]: trace for trace in plots[0]["data"]}
    assert loss["replica 2"]["y"] == pytest.approx([c.losses[2] for c in results.cycles], rel=1e-5)
    assert loss["consensus, held-out data"]["x"] == [125, 250, 375, 500]
    lower, upper, centre, *moves = plots[1]["data"]
    lrs = [known(knob.values) for _, knob in results.knob("embedding")]
    assert lower["y"] == pytest.approx([min(each) for each in lrs], rel=1e-5)
    assert upper["y"] == pytest.approx([max(each) for each in lrs], rel=1e-5)
    assert centre["y"] == pytest.approx([sum(each) / 4 for each in lrs], rel=1e-5)
    assert sum(len(trace["x"]) for trace in moves) == 20
    assert all("hypergradient" in text for text in centre["text"])
    pulls = plots[2]["data"][0]
    assert pulls["error_y"]["array"] == pytest.approx(
        [knob.hypergradient_error for _, knob in results.knob("embedding")], rel=1e-5
    )


def test_plotly_accepts_all_traces_and_layouts(tmp_path: Path) -> None:
    runs = [write_sample(tmp_path / name, cycles=8, excluded={2: 1}) for name in "ab"]
    many = write_sample(tmp_path / "many", cycles=4, replicas=9, knobs=list("abcdefghi"))
    dense = write_sample(tmp_path / "dense", cycles=400, knobs=["a"])
    for page in (page_of(*runs), page_of(many), page_of(dense)):
        for plot in plots_of(page):
            graph_objects.Figure(painted(plot))


def test_thick_line_is_the_mean_if_no_held_out_loss_was_noted(tmp_path: Path) -> None:
    page = page_of(write_sample(tmp_path / "a", held_out=False))
    assert plots_of(page)[0]["data"][-1]["name"] == "mean of the replicas (training)"
    assert "no held-out loss of the consensus was noted" in page


def test_point_between_two_gaps_gets_a_marker(tmp_path: Path) -> None:
    run = write_sample(tmp_path / "a", cycles=50, excluded={10: 1, 12: 1})
    trace = plots_of(page_of(run))[0]["data"][1]
    assert trace["y"][10] is None
    assert "markers" in trace["mode"]
    assert [i for i, size in enumerate(trace["marker"]["size"]) if size] == [11]
    assert "(step %{x:,d})" in trace["hovertemplate"]


@pytest.mark.parametrize(("lr", "kind"), [(1e-4, "log"), (2e-3, "linear")])
def test_learning_rate_over_more_than_a_decade_has_a_log_axis(
    tmp_path: Path, lr: float, kind: str
) -> None:
    run = write_sample(tmp_path / "a", lr=lr, best=1e-2 if kind == "log" else 3e-3, knobs=["a"])
    axis = plots_of(page_of(run))[1]["layout"]["yaxis"]
    assert axis["type"] == kind
    assert ("log scale" in axis["title"]["text"]) == (kind == "log")


def test_axes_cut_off_no_point(tmp_path: Path, hostile: Path) -> None:
    for page in (page_of(hostile), page_of(write_sample(tmp_path / "a", excluded={39: 3}))):
        for plot in plots_of(page):
            low, high = plot["layout"]["xaxis"]["range"]
            assert all(low < x < high for trace in plot["data"] for x in trace["x"])
            if "range" in plot["layout"]["yaxis"]:
                bottom, top = sorted(plot["layout"]["yaxis"]["range"])
                assert all(bottom < y < top for trace in plot["data"] for y in trace["y"])


def test_reader_picks_one_of_many_knobs_from_a_list(tmp_path: Path) -> None:
    names = [f"layer{i}" for i in range(12)]
    page = page_of(write_sample(tmp_path / "a", knobs=names))
    assert re.findall(r"<option>(.*?)</option>", page) == names
    assert "All knobs" in titles_of(page)


@pytest.mark.filterwarnings("ignore:the probe cannot compare values of")
def test_each_knob_is_shown_with_its_sensitivity(tmp_path: Path) -> None:
    steered(tmp_path).go(30)
    page = page_of(tmp_path)
    titles = titles_of(page)
    assert {"Learning rate: weights", "Knob: weight_decay", "Sensitivity"} <= set(titles)
    plots = dict(zip(titles, plots_of(page), strict=True))
    names = [trace["name"] for trace in plots["Sensitivity"]["data"] if trace.get("text")]
    assert names[2:] == ["weight_decay", "attention_temperature", "label_smoothing"]
    results = read(tmp_path)
    assert "Probing" in body_of(page)
    assert all(0 < (cycle.probe_share or 0) < 1 for cycle in results.cycles)
    assert [len(cycle.scores or ()) for cycle in results.cycles] == [8] * 10
    for figure in map(painted, plots.values()):
        graph_objects.Figure(figure["data"], figure["layout"])


def test_scores_of_a_search_are_drawn(tmp_path: Path) -> None:
    one = write_sample(tmp_path / "a", cycles=3, knobs=("all",), scouted=True, lr=1e-3)
    page = page_of(one)
    (plot,) = [p for p in plots_of(page) if p["data"][0]["name"] == "score"]
    assert plot["data"][0]["x"][:2] == pytest.approx([1e-5, 4e-5])
    assert plot["data"][0]["y"][-1] == 90.0
    assert plot["layout"]["shapes"][0]["x0"] == pytest.approx(2e-3)
    body = body_of(page)
    assert "What the scout saw" in body
    assert "1 of them lie above the frame. At 0.164 nothing finite was left." in body
    assert "Chosen: 2e-3, the lowest that gains nearly as much as the best." in body
    assert plot["data"][1]["x"] == pytest.approx([1e-3, 2e-3, 4e-3])
    assert "The schedule peaks at 4e-3: what was found, for the batch of all replicas and" in body
    assert "taken back to its best weights" in body
    assert "mean loss 9 exceeds the limit 4 (recent level 3)" in body
    several = page_of(write_sample(tmp_path / "b", cycles=3, scouted=True))
    assert "times the given learning rate" not in several
    record = one / "record.jsonl"
    record.write_text(record.read_text().replace('"found": 2.0', '"found": null'))
    assert "None of them was chosen: the lowest that gains" in body_of(page_of(one))
    graph_objects.Figure(painted({"data": plot["data"], "layout": plot["layout"]}))


def test_estimate_of_a_search_is_told_with_its_evidence(tmp_path: Path) -> None:
    sample = Sample(cycles=3, knobs=("all",), lr=1e-3)
    older = ("refined", "noise", "found", "lowest_lost")
    event = {key: value for key, value in sample.scout().items() if key not in older}
    event |= {"factor_reason": "decided mostly by what short rounds gained", "divergence": 20.0}
    event |= {"within": 1.8, "shares": {"prior": 0.1, "gains": 0.84, "divergence": 0.06}}
    lines = list(sample.lines())
    (tmp_path / "record.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [lines[0], event, *lines[1:]])
    )
    page = page_of(tmp_path)
    (plot,) = [p for p in plots_of(page) if p["data"][0]["name"] == "score"]
    assert len(plot["data"]) == 1
    assert plot["layout"]["shapes"][0]["x0"] == pytest.approx(4e-3)
    body = body_of(page)
    assert "Scores explode from 0.02 on. The schedule peaks at 4e-3: decided mostly by" in body
    assert "The best is probably within a factor of 1.8 of it." in body
    assert "usual learning rates 10%, gains 84%, divergence 6%." in body
    assert "None of them" not in body


def test_search_without_scores_has_no_chart(tmp_path: Path) -> None:
    sample = Sample(cycles=3, knobs=("all",))
    event = {**sample.scout(), "points": sample.scout()["points"][-1:], "refined": []}
    lines = list(sample.lines())
    (tmp_path / "record.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [lines[0], event, *lines[1:]])
    )
    page = page_of(tmp_path)
    assert not [p for p in plots_of(page) if p["data"][0]["name"] == "score"]
    assert "What the scout saw" not in body_of(page)


def test_each_search_has_its_own_plot(tmp_path: Path) -> None:
    """Rounds of one are one; a look in mid-run is another, and hides nothing."""
    sample = Sample(cycles=6, knobs=("all",), lr=1e-3)
    first, begun = {**sample.scout(), "factor": None}, sample.scout()
    look = {
        "mid_run": True,
        "factor": 1.0,
        "factor_reason": "3.96 times it is no reason to change it",
    }
    lines = [*sample.lines(), {**begun, **look, "step": sample.sync_every * 5 + 12}]
    record = tmp_path / "record.jsonl"
    record.write_text(
        "".join(json.dumps(line) + "\n" for line in [lines[0], first, begun, *lines[1:]])
    )
    page = page_of(tmp_path)
    assert len([p for p in plots_of(page) if p["data"][0]["name"] == "score"]) == 2
    body = body_of(page)
    assert "What the scout saw" in body
    assert f"What it saw until step {sample.sync_every * 5 + 12}" in body
    assert "From here on learning rates are 1 times what they were: 3.96 times it is no" in body


def test_run_that_is_started_over_shows_only_its_own_search(tmp_path: Path) -> None:
    sample = Sample(cycles=3, knobs=("all",), scouted=True)
    lines = [*sample.lines(), *sample.lines()]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (seen,) = read(tmp_path).scouts
    assert seen.step == 12


def test_page_of_one_replica_without_exclusions(tmp_path: Path) -> None:
    page = page_of(write_sample(tmp_path / "a", replicas=1, held_out=False, knobs=["all"]))
    assert "No replica was excluded." in body_of(page)
    assert [trace["name"] for trace in plots_of(page)[0]["data"]] == ["replica 0"]


def test_page_of_an_empty_record_and_of_a_run_before_its_first_cycle(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").touch()
    assert "This record is empty" in body_of(page_of(tmp_path))
    run = write_lines(tmp_path / "a", [Sample().start()])
    page = page_of(run)
    assert "unfinished: step 0 of 1,000" in page
    assert plots_of(page) == []


def test_page_names_resumes_and_damaged_lines(tmp_path: Path) -> None:
    run = write_lines(tmp_path / "a", Sample(cycles=20, total_cycles=40).lines())
    with (run / "record.jsonl").open("a") as file:
        file.write("{broken\n")
    write_lines(run, Sample(cycles=30, total_cycles=30, replicas=6).lines(first=10))
    body = body_of(page_of(run))
    assert "1 damaged line was skipped." in body
    assert "line 26: not JSON" in body
    assert "12 lines were left out" in body
    assert "resumed at step 250" in body
    assert "4 → 6" in body
    assert "Changed settings (1)" in body
    assert "finished" in body


def test_comparison_names_damaged_lines(tmp_path: Path) -> None:
    a, b = write_sample(tmp_path / "a", cycles=3), write_sample(tmp_path / "b", cycles=3)
    with (b / "record.jsonl").open("a") as file:
        file.write("{broken\n")
    above = body_of(page_of(a, b)).split("<details")[0]
    assert "b: 1 damaged line was skipped." in above


def test_comparison_draws_several_runs_in_one_plot(tmp_path: Path) -> None:
    a = write_sample(tmp_path / "a")
    b = write_sample(tmp_path / "b", seed=1, held_out=False, knobs=["embedding", "head"])
    page = page_of(a, b)
    titles, plots = titles_of(page), plots_of(page)
    places = [int(n) for n in re.findall(r'data-plot="(\d+)"', page)]
    names = {
        title: [t["name"] for t in plots[place]["data"] if t.get("showlegend") is not False]
        for title, place in zip(titles[:6], places[:6], strict=True)
    }
    assert names["Held-out loss of the consensus"] == ["a"]
    assert names["Training loss"] == ["a", "b"]
    assert names["Learning rate: embedding"] == ["a", "b"]
    assert names["Learning rate: blocks"] == ["a"]
    assert names["Learning rate: head"] == ["b"]
    assert "1 of 2 runs noted none" in page


def test_runs_in_folders_of_the_same_name_get_different_labels(tmp_path: Path) -> None:
    paths = [tmp_path / part / "record.jsonl" for part in ("a/run", "b/run", "c")]
    histories = [History(path=path) for path in paths]
    assert report.labels(histories) == ["a/run", "b/run", "c"]
    assert report.labels([histories[2], histories[2]])[0] != report.labels([histories[2]] * 2)[1]


def test_texts_of_a_record_are_escaped(hostile: Path) -> None:
    page = page_of(hostile, write_sample(hostile.parent / "b"))

    class Tags(HTMLParser):
        found: list[str] = []  # noqa: RUF012
        depth = 0

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found.append(tag)
            assert not any(name.startswith("on") for name, _ in attrs)

    tags = Tags()
    tags.feed(page)
    assert tags.found.count("script") == 4
    assert not {"img", "b", "a", "iframe", "link"} & set(tags.found)
    assert "&lt;script&gt;window.harmed = 1&lt;/script&gt;" in body_of(page)
    for plot in plots_of(page):
        for text in texts_of(plot):
            assert set(re.findall(r"<[^>]*>?", text)) <= {
                *("<br>", "<b>", "</b>", "<extra>", "</extra>")
            }, text
            assert "<b>bold" not in text
            assert "<b>run" not in text


def test_record_with_random_damage_still_makes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdet.report.html_page.plotly_script", str)
    chance = random.Random(0)
    nonsense: list[Any] = [
        None,
        0,
        -1,
        1e308,
        -1e308,
        1e-320,
        True,
        10**400,
        7,
        "up",
        [],
        {},
        [None],
        [[1]],
    ]

    def damaged(value: Any) -> Any:
        if chance.random() < 0.01:
            return chance.choice(nonsense)
        if isinstance(value, dict):
            return {key: damaged(entry) for key, entry in value.items()}
        return [damaged(entry) for entry in value] if isinstance(value, list) else value

    kept = 0
    for trial in range(200):
        lines = [
            {name: damaged(value) for name, value in line.items()}
            for line in Sample(cycles=6, excluded={2: 1}, scouted=True).lines()
        ]
        results = read(write_lines(tmp_path / str(trial), lines))
        kept += len(results.cycles)
        assert "</html>" in report.render([results])
        assert "</html>" in report.render([results, results])
    assert kept > 200


def test_page_is_one_file_without_links_to_the_network(tmp_path: Path) -> None:
    page = page_of(write_sample(tmp_path / "a", cycles=5))
    own = page.replace(plotly_script(), "")
    assert not re.search(r"https?://|url\(|@import|<link|src=", own)
    assert "default-src 'none'" in own
    assert page.count(plotly_script()) == 1
    assert '<html lang="en">' in page
    assert 'name="viewport"' in page


def test_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = write_sample(tmp_path / "a", cycles=5000, knobs=["all"])
    page = page_of(run)
    assert len(page) - len(plotly_script()) < 4_000_000
    assert "stays are not marked; their reasons are in the record" in page


def test_write_makes_the_folder_of_the_page(tmp_path: Path) -> None:
    run = write_sample(tmp_path / "a", cycles=5)
    (results,) = report.write([run], tmp_path / "new" / "report.html")
    assert results.name == "a"
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8").startswith("<!doctype")
    with pytest.raises(ValueError, match="at least one run"):
        report.render([])


def test_error_without_plotly_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    run = write_sample(tmp_path / "a", cycles=2)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hdet\[report\]'"):
        page_of(run)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_enough_contrast(theme: str) -> None:
    palette = PALETTES[theme]

    def contrast(name: str, ground: str) -> float:
        one, other = sorted([luminance(palette[name]), luminance(palette[ground])])
        return (other + 0.05) / (one + 0.05)

    for ground in ("card", "bg"):
        assert all(contrast(name, ground) >= 4.5 for name in ("ink", "soft", "good", "wait"))
    assert all(contrast(f"c{i}", "card") >= 3 for i in range(8))

"""`hdet report`: the page that shows what a run did, or how several runs compare.

Reads the records with `hdet.records.reader`, draws the plots of `hdet.report.figures`, and puts
them into one HTML file with `hdet.report.html_page`. The page needs nothing from the network.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hdet.records.history import History
from hdet.records.reader import read
from hdet.report.comparison_page import comparison_body
from hdet.report.html_page import PageBuilder
from hdet.report.run_page import details, header


def render(histories: Sequence[History]) -> str:
    """One self-contained HTML page about one run, or a comparison of several.

    Args:
        histories: The runs, in the order in which they are shown.

    Raises:
        ValueError: There is no run.
        ModuleNotFoundError: plotly is not installed.
    """
    if not histories:
        raise ValueError("`histories` must hold at least one run, got none.")
    page = PageBuilder()
    runs = list(zip(labels(histories), histories, strict=True))
    if len(runs) == 1:
        (who, history) = runs[0]
        body, title = header(who, history) + details(page, history), who
    else:
        title = f"{len(runs)} runs compared"
        body = comparison_body(page, runs)
    foot = "<footer>Made by hdet report from the records of the runs. Nothing on this page comes "
    foot += "from the network.</footer>"
    return page.html(f"{title} - hdet report", body + foot)


def write(runs: Sequence[str | Path], path: str | Path) -> list[History]:
    """Read the records of runs and write the page about them.

    Args:
        runs: The folders of the runs, or their record files.
        path: The page to write. Its folder is made if it does not exist.

    Returns:
        The histories of the runs.

    Raises:
        FileNotFoundError: A run has no record.
        ValueError: A newer version of hdet wrote a record.
        ModuleNotFoundError: plotly is not installed.
    """
    histories = [read(run) for run in runs]
    page = render(histories)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(page, encoding="utf-8")
    return histories


def labels(histories: Sequence[History]) -> list[str]:
    """A name for each run: that of its folder, with parent folders where names are equal."""
    names = [history.name or "run" for history in histories]
    folders = [history.path.resolve().parent.parts for history in histories]
    for depth in range(2, max(len(parts) for parts in folders) + 1):
        twice = {name for name, count in Counter(names).items() if count > 1}
        if not twice:
            break
        names = [
            "/".join(part.strip("/") for part in parts[-depth:]) if name in twice else name
            for name, parts in zip(names, folders, strict=True)
        ]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        names[index] = f"{name} ({seen[name]})" if seen[name] > 1 else name
    return names

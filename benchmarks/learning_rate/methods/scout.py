"""hdet with a scout at the start, and hdet with a guard that starts a run again."""

from collections.abc import Sequence

import hdet
from benchmarks.learning_rate.methods.bench import Bench, Ended, Run
from benchmarks.learning_rate.methods.guards import RowGuards
from benchmarks.learning_rate.methods.rows import train_rows
from benchmarks.learning_rate.methods.search import Signal, plan_by_search, start_of
from hdet.lr_search.reasons import describe
from hdet.scheduler.search_result import is_far_off


def with_scout(
    bench: Bench,
    runs: Sequence[Run],
    *,
    by: Signal = "probe",
    guard: bool = True,
    scout: hdet.Scout | None = None,
) -> list[Ended]:
    """hdet: a scout, then a plain run that a guard looks after."""
    plans, searches = plan_by_search(bench, runs, by=by, scout=scout)
    watch = RowGuards(hdet.Guard()) if guard else None
    ended = train_rows(bench, plans, watch=watch)
    notes = [
        {
            "points": [list(point) for point in search.observations.points],
            "outset": search.start_score,
            "steps": search.used,
            "explosion": search.divergence,
            "found": chosen.factor,
            "within": chosen.within,
            "shares": chosen.shares,
            "reason": f"{describe(search.reasons)}; {chosen.text}",
            "returns": watch.returns[row] if watch is not None else 0,
        }
        for row, search in enumerate(searches)
        for chosen in [start_of(bench, search)]
    ]
    return [end._replace(notes=note) for end, note in zip(ended, notes, strict=True)]


def with_restart(bench: Bench, runs: Sequence[Run]) -> list[Ended]:
    """hdet with `scout="restart"`: the given learning rate is kept unless it is far off."""
    scout = hdet.Scout(restart=True)
    plans, searches = plan_by_search(bench, runs, by="probe", scout=scout)
    kept = [not is_far_off(start_of(bench, search)) for search in searches]
    for place, run in enumerate(runs):
        if kept[place]:
            plans[place] = plans[place]._replace(peaks=(run.lr,) * len(plans[place].peaks))
    watch = RowGuards(hdet.Guard())
    ended = train_rows(bench, plans, watch=watch)
    notes = [
        {"returns": returns, "kept": is_kept, "begin": plan.begin}
        for returns, is_kept, plan in zip(watch.returns, kept, plans, strict=True)
    ]
    return [end._replace(notes=note) for end, note in zip(ended, notes, strict=True)]

"""What does hdet cost on clusters, by a model of a step and a converge? -> scale.json

    python -m benchmarks.systems.scale --measure [--quick] [--out FILE]  the points, on one machine
    python -m benchmarks.systems.scale --decisions [--out FILE]          only those of decisions
    python -m benchmarks.systems.scale [--out FILE]                      the fit and the tables

The first command writes the points of points.py into results/scale.json. The second fits
a few coefficients to some of them, checks what these say of the others, simulates a cluster with
the same forms and the hardware it is told, and draws docs/assets/scale.svg. A fit is by
relative errors, squared up to a tenth and by their amount beyond: one point that the machine has
disturbed does not bend it. No coefficient is negative.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.result_file import RESULTS, plain_json, text_of, write_result
from benchmarks.systems import points, scale_page
from benchmarks.systems.cluster import ETHERNET, INFINIBAND, table
from benchmarks.systems.points import Point
from benchmarks.systems.scale_fit import fit_all

# The answer ----------------------------------------------------------------------------------


def answer(known: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    fits = fit_all(known)
    errors = {
        name: [abs(point["error_pct"]) for point in found.held_out] for name, found in fits.items()
    }
    everything = [error for part in errors.values() for error in part]
    outside = [abs(point["error_pct"]) for found in fits.values() for point in found.outside]
    coefficients = {name: found.coefficients for name, found in fits.items()}
    (decision,) = (
        p["seconds"] for p in known["decision"] if (p["replicas"], p["knobs"]) == (64, 16)
    )
    return {
        "headline": {
            "model_error_pct": max(everything),
            "model_median_error_pct": median(everything),
            "short_of_cores_error_pct": max(outside, default=0.0),
            "decision_ms_n64_k16": 1e3 * decision,
            **scale_page.numbers_of(known, coefficients),
        },
        "errors_pct": {
            name: {"points": len(part), "median": median(part), "worst": max(part)}
            for name, part in errors.items()
        },
        "fits": {name: found._asdict() for name, found in fits.items()},
        "assumptions": {"infiniband": INFINIBAND._asdict(), "ethernet": ETHERNET._asdict()},
        "table": table(INFINIBAND, coefficients),
        "table_ethernet": table(ETHERNET, coefficients),
    }


PARTS = (
    "headline",
    "errors_pct",
    "fits",
    "assumptions",
    "table",
    "table_ethernet",
    "points",
    "tables",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="make the points anew")
    parser.add_argument("--decisions", action="store_true", help="these alone; the rest is kept")
    parser.add_argument("--quick", action="store_true", help="few points, to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or RESULTS / ("scale.quick.json" if options.quick else "scale.json")

    settings = points.QUICK if options.quick else points.FULL

    def keep(outcome: dict[str, Any]) -> None:
        write_result(out, headline={}, settings=settings._asdict(), seeds=[], points=outcome)

    if options.measure:
        points.measure(settings, keep)
        return
    outcome = json.loads(out.read_text())
    if options.decisions:  # plain Python: any machine will do
        outcome["points"]["decision"] = points.decisions(points.FULL)
    found = {**outcome, **plain_json(answer(outcome["points"])), "points": outcome["points"]}
    found["tables"] = scale_page.tables(found)
    if options.decisions:  # else nothing was measured, and the file says with what it was made
        parts = {key: value for key, value in found.items() if key in PARTS}
        found = write_result(out, seeds=[], kept=outcome, settings=outcome["settings"], **parts)
    else:
        out.write_text(text_of(found))
    if options.out is None:
        scale_page.draw(found)
    print(json.dumps({"headline": found["headline"], "errors_pct": found["errors_pct"]}, indent=1))


if __name__ == "__main__":
    main()

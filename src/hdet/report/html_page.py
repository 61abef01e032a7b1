"""The page of a report: one HTML file that needs no other.

Holds the palettes, the style, and the script that draws the plots when they come into view.
"""

import importlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.report.html_elements import text
from hdet.report.plot import Plot

# On light and on dark. The lines are after Okabe and Ito, made darker (lighter) until each has a
# contrast of 3 to 1 with its card.
TINTS = {
    "bg": ("#f5f6f8", "#0e1115"),
    "card": ("#ffffff", "#161a20"),
    "ink": ("#12161c", "#f0f3f7"),
    "soft": ("#56606e", "#a4aebb"),
    "line": ("#d9dee5", "#303844"),
    "grid": ("#eceff3", "#242a33"),
    "good": ("#00704f", "#3ddba9"),
    "wait": ("#8a5a00", "#f0c04b"),
    "c0": ("#0072b2", "#56b4e9"),
    "c1": ("#c84e00", "#ff8b4d"),
    "c2": ("#00805e", "#2bd0a0"),
    "c3": ("#ab4a85", "#e79bc8"),
    "c4": ("#8f6b00", "#f0c84b"),
    "c5": ("#5a4fcf", "#aaa3ff"),
    "c6": ("#b3261e", "#ff9c95"),
    "c7": ("#3f7f93", "#9fd8e8"),
}
PALETTES = {
    theme: {name: tints[index] for name, tints in TINTS.items()}
    for index, theme in enumerate(("light", "dark"))
}

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)

STYLE = """
*, *::before, *::after { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 72px; }
h1, h2, h3, p, figure, dl, dd { margin: 0; }
h1 { font-size: clamp(1.7rem, 4vw, 2.5rem); line-height: 1.15; letter-spacing: -.022em;
  font-weight: 680; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; letter-spacing: -.012em; margin: 48px 0 16px; }
h3 { font-size: 1rem; font-weight: 620; overflow-wrap: anywhere; }
.eyebrow { color: var(--soft); font-size: .82rem; font-weight: 600; letter-spacing: .06em;
  text-transform: uppercase; margin-bottom: 8px; }
.lede { color: var(--soft); margin-top: 8px; overflow-wrap: anywhere; }
.answer { margin-top: 14px; max-width: 62em; font-size: 1.08rem; overflow-wrap: anywhere; }
.answers { margin: 14px 0 0; }
.group { margin: 20px 0 8px; }
.answers dt { font-weight: 640; overflow-wrap: anywhere; }
.answers dd { margin: 0 0 12px; max-width: 62em; overflow-wrap: anywhere; }
.status { display: flex; align-items: center; flex-wrap: wrap; gap: 8px 14px; margin-top: 16px; }
.pill { display: inline-flex; align-items: center; gap: 8px; padding: 3px 12px; font-size: .88rem;
  font-weight: 600; border: 1px solid currentColor; border-radius: 99px; color: var(--wait); }
.pill::before { content: ""; width: 8px; height: 8px; border: 2px solid; border-radius: 50%; }
.pill.done { color: var(--good); }
.pill.done::before { background: currentColor; }
progress { appearance: none; height: 6px; width: min(240px, 50vw); border: 0; border-radius: 9px;
  overflow: hidden; background: var(--line); }
progress::-webkit-progress-bar { background: var(--line); }
progress::-webkit-progress-value { background: var(--c0); }
progress::-moz-progress-bar { background: var(--c0); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 28px; }
.tile, figure, .box, details { background: var(--card); border: 1px solid var(--line);
  border-radius: 14px; }
.tile { flex: 1 1 106px; padding: 14px 16px; min-width: 0; }
.tile.two { flex: 2 1 316px; }
.tile dt { color: var(--soft); font-size: .82rem; }
.tile dd { font-size: 1.14rem; font-weight: 640; letter-spacing: -.01em; line-height: 1.3;
  margin-top: 2px; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.tile dd + dd { color: var(--soft); font-size: .82rem; font-weight: 400; letter-spacing: 0;
  margin-top: 4px; }
.tile small { font-size: .8rem; font-weight: 400; color: var(--soft); letter-spacing: 0; }
.notice { margin-top: 16px; padding: 12px 16px; border-left: 4px solid var(--wait);
  background: var(--card); border-radius: 6px; font-size: .93rem; overflow-wrap: anywhere; }
.notice ul { margin: 6px 0 0; padding-left: 20px; }
.grid { display: grid; grid-template-columns: repeat(12, minmax(0, 1fr)); gap: 16px; }
.grid[hidden] { display: none; }
figure { padding: 16px 16px 12px; grid-column: span 12; min-width: 0; }
figure.half { grid-column: span 6; }
figure.most { grid-column: span 7; }
figure.rest { grid-column: span 5; }
figure.half:last-child:nth-child(odd) { grid-column: span 12; }
.grid ~ .box, .pick ~ .box { margin-top: 16px; }
.tile span { white-space: nowrap; }
figcaption { color: var(--soft); font-size: .87rem; line-height: 1.45; margin-top: 2px; }
.plot { height: 400px; margin-top: 8px; }
.half .plot, .most .plot, .rest .plot { height: 320px; }
.none { color: var(--soft); padding: 14px 16px; grid-column: span 12; }
.scroll { overflow: auto; max-height: 460px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
.about { padding: 12px 16px 4px; color: var(--soft); font-size: .87rem; }
th, td { text-align: left; padding: 8px 16px; border-top: 1px solid var(--grid);
  vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; border-top: 0; vertical-align: bottom; }
thead th.n { white-space: normal; min-width: 6.5em; overflow-wrap: break-word; }
tbody th { font-weight: 600; overflow-wrap: anywhere; min-width: 9em; max-width: 22em; }
td { overflow-wrap: break-word; max-width: 40em; }
td.n, th.n { text-align: right; white-space: nowrap; }
details { margin-top: 12px; overflow: hidden; }
details > summary { cursor: pointer; padding: 13px 16px; font-weight: 600;
  overflow-wrap: anywhere; }
details[open] > summary { border-bottom: 1px solid var(--line); }
details.run { background: none; }
details.run > summary { background: var(--card); }
details.run > div { padding: 0 16px 20px; }
.pick { display: inline-flex; gap: 10px; align-items: center; margin: 16px 0; font-weight: 600;
  max-width: 100%; }
select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 9px; padding: 7px 10px; min-width: 0; max-width: 60vw; }
:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; }
footer { color: var(--soft); font-size: .85rem; margin-top: 48px; }
@media (max-width: 760px) {
  main { padding: 24px 14px 48px; }
  figure.half, figure.most, figure.rest { grid-column: span 12; }
  figure { padding: 14px 10px 10px; }
  figure h3, figcaption { padding: 0 4px; }
  .plot, .half .plot, .most .plot, .rest .plot { height: 350px; }
  .tiles { gap: 10px; }
  .tile, .tile.two { flex: 1 1 40%; }
  .tile.two { flex-basis: 100%; order: -1; }
  details.run > div { padding: 0 10px 14px; }
}
@media print { .plot, figure, .tile { break-inside: avoid; } .scroll { max-height: none; } }
"""

# Colours are looked up by name when a plot is drawn, and again when the reader's theme changes.
SCRIPT = """
(() => {
  const read = id => JSON.parse(document.getElementById(id).textContent);
  const plots = read('plots'), palettes = read('palettes');
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const coarse = matchMedia('(pointer: coarse)').matches;
  const drawn = new Map();
  const tint = name => {
    const [key, alpha] = name.slice(1).split('/');
    const hex = palettes[dark.matches ? 'dark' : 'light'][key];
    return hex + (alpha ? Math.round(alpha * 255).toString(16).padStart(2, '0') : '');
  };
  const themed = (value, key) => {
    if (Array.isArray(value))
      return value[0] && typeof value[0] === 'object' ? value.map(v => themed(v)) : value;
    if (value && typeof value === 'object')
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k)]));
    return /color$/.test(key) && String(value)[0] === '@' ? tint(value) : value;
  };
  // Only buttons named here: plotly's own choice has one that sends the plot to its makers.
  const config = { responsive: true, displaylogo: false, typesetMath: false, scrollZoom: false,
    showSendToCloud: false, plotlyServerURL: '',
    modeBarButtons: [['toImage', 'zoom2d', 'pan2d', 'resetScale2d']] };
  const draw = place => {
    const plot = themed(plots[place.dataset.plot]);
    // A finger that strokes a plot means to scroll the page.
    if (coarse) plot.layout.dragmode = false;
    if (place.clientWidth < 480) plot.layout.xaxis.nticks = 4;
    plot.layout.modebar = { bgcolor: 'rgba(0,0,0,0)', color: tint('@soft'),
      activecolor: tint('@ink') };
    const options = { format: 'svg', width: 1200, height: 600, filename: place.dataset.name };
    const how = { ...config, toImageButtonOptions: options };
    return Plotly.react(place, plot.data, plot.layout, how);
  };
  // One after the other: a plot that is drawn again while it is drawn may keep what it had.
  const drawAgain = place =>
    drawn.set(place, drawn.get(place).then(() => draw(place), () => draw(place)));
  const watch = new IntersectionObserver(entries => {
    for (const entry of entries)
      if (entry.isIntersecting && !drawn.has(entry.target)) {
        watch.unobserve(entry.target);
        drawn.set(entry.target, draw(entry.target));
      }
  }, { rootMargin: '500px' });
  const places = document.querySelectorAll('.plot');
  places.forEach(place => watch.observe(place));
  dark.addEventListener('change', () => [...drawn.keys()].forEach(drawAgain));
  addEventListener('beforeprint', () => places.forEach(p => {
    if (p.offsetParent) drawn.set(p, draw(p));
  }));
  document.querySelectorAll('select[data-panels]').forEach(select => {
    const panels = [...document.getElementById(select.dataset.panels).children];
    const show = () => panels.forEach((panel, i) => { panel.hidden = i !== select.selectedIndex; });
    select.addEventListener('change', show);
    show();
  });
})();
"""


def embedded(value: Any) -> str:
    r"""JSON that can stand in a script element: it never ends the element.

    >>> embedded("</script>")
    '"\\u003c/script>"'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def plotly_script() -> str:
    """The source of plotly.js, from the plotly package."""
    try:
        offline = importlib.import_module("plotly.offline")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("plotly"):
            raise
        raise ModuleNotFoundError(
            "hdet report needs plotly: pip install 'hdet[report]'", name="plotly"
        ) from None
    return str(offline.get_plotlyjs())


class PageBuilder:
    """Collects the plots of a page, and makes the elements that show them."""

    def __init__(self) -> None:
        self._plots: list[dict[str, Any]] = []
        self._num_pickers = 0

    def figure(self, plot: Plot | None) -> str:
        """The element of one plot; empty without a plot."""
        if plot is None:
            return ""
        self._plots.append({"data": plot.data, "layout": plot.layout})
        about = text(f"Plot: {plot.title}. {plot.caption}")
        return (
            f'<figure class="{plot.size}"><h3>{text(plot.title)}</h3>'
            f"<figcaption>{text(plot.caption)}</figcaption>"
            f'<div class="plot" role="img" aria-label="{about}" '
            f'data-plot="{len(self._plots) - 1}" data-name="{text(plot.title)}"></div></figure>'
        )

    def grid(self, plots: Iterable[Plot | None], *more: str) -> str:
        """Plots side by side, then other elements; empty if there are none."""
        inside = "".join(map(self.figure, plots)) + "".join(more)
        return f'<div class="grid">{inside}</div>' if inside else ""

    def picker(self, what: str, panels: Sequence[tuple[str, str]]) -> str:
        """Several panels, of which the reader picks one by its name."""
        self._num_pickers += 1
        place = f"panels{self._num_pickers}"
        options = "".join(f"<option>{text(name)}</option>" for name, _ in panels)
        shown = "".join(f"<div>{inside}</div>" for _, inside in panels)
        return (
            f'<label class="pick">{text(what)} <select data-panels="{place}">{options}</select>'
            f'</label><div id="{place}">{shown}</div>'
        )

    def html(self, title: str, body: str) -> str:
        """The whole file, with the data of all plots."""
        page = (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{text(title)}</title>\n<style>{_variables()}{STYLE}</style>\n</head>\n"
            f"<body>\n<main>\n{body}\n"
            "<noscript><p>The plots of this page need JavaScript.</p></noscript>\n</main>\n"
            f"<script>{plotly_script()}</script>\n"
            f'<script type="application/json" id="palettes">{embedded(PALETTES)}</script>\n'
            f'<script type="application/json" id="plots">{embedded(self._plots)}</script>\n'
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
        )
        # JSON can spell half a surrogate pair, which no file can hold.
        return page.encode("utf-8", "replace").decode("utf-8")


def _variables() -> str:
    """The palettes as CSS variables, for light and dark."""

    def root(palette: str) -> str:
        entries = PALETTES[palette].items()
        return ":root {" + "".join(f"--{name}:{value};" for name, value in entries) + "}"

    return (
        f"{root('light')} @media (prefers-color-scheme: dark) {{ {root('dark')} }}"
        ":root { color-scheme: light dark; }"
    )

"""The charts of a tuning's result, as Vega-Lite specifications and as files; and how its figures are written.

vl-convert compiles and draws specifications without a browser.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakiyomi.errors import OptionError
from sakiyomi.files import replace_file

Row = dict[str, Any]
Result = Mapping[str, Any]

MISSING = "–"
LEAST_REACHED = 10
"""Acceptance at a position that fewer rounds reached is mostly chance, and not shown."""

# Colours are named, as the page's style sheet defines them twice: a chart follows the reader's scheme, and the printer,
# without being drawn again. Those of drafters stay apart for every kind of colour vision, and shapes say the same.
COLOURS = 8
_NAMES = ["page", "card", "ink", "muted", "grid", "good", "bad", "unsure", *(f"c{i}" for i in range(COLOURS))]
_LIGHT = (
    "#fbfbf9 #ffffff #1d2126 #5a626c #e3e5e3 #00795c #b3340d #8a6500 "
    "#1e89fd #c21d0b #067169 #7825a3 #ca810b #896bb5 #3a3f50 #840006"
)
_DARK = (
    "#15181c #1d2126 #e8eaec #a3abb5 #343a41 #2fc7a0 #ff8a5b #e3bf4e "
    "#5a7cfc #ec540e #7fd4c6 #b07397 #fbd840 #ab9eec #dbf3fd #fc9565"
)
LIGHT = dict(zip(_NAMES, _LIGHT.split(), strict=True))
DARK = dict(zip(_NAMES, _DARK.split(), strict=True))
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def require_charts() -> None:
    """Raise OptionError where the package that draws charts is missing: cheap, for a check before the work."""
    from importlib.util import find_spec

    if find_spec("vl_convert") is None:
        raise OptionError(
            "the report's charts need vl-convert-python: pip install 'sakiyomi[tune]', or go without (--no-report)"
        )


def write_plots(result: Result, folder: Path) -> list[Path]:
    """Write every chart that has data as NAME.svg and NAME.png, in light colours, and return the files.

    Makes the folder. Raises OptionError where the package that draws charts is missing, or a file can't be written.
    """
    require_charts()
    import vl_convert

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{folder}: can't be made ({error.strerror})") from None
    written = []
    for chart in charts(clean(result)):
        spec = json.dumps(chart.spec(640))
        for name, colour in LIGHT.items():
            spec = spec.replace(f"var(--{name})", colour)
        spec = spec.replace(FONT, "sans-serif")  # the only name that every place has
        svg = vl_convert.vegalite_to_svg(spec).encode()
        png = vl_convert.vegalite_to_png(spec, scale=2)
        for suffix, data in ((".svg", svg), (".png", png)):
            path = folder / f"{chart.name}{suffix}"
            replace_file(path, functools.partial(Path.write_bytes, data=data))
            written.append(path)
    return written


# --- the result --------------------------------------------------------------------------------------------------


def clean(value: Any) -> Any:
    """Return a result as JSON and UTF-8 can hold it: no NaN, no infinities, no lone surrogates."""
    if isinstance(value, Mapping):
        return {str(clean(name)): clean(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [clean(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def rows(result: Result, name: str) -> list[Row]:
    """Return the rows of a table of a result."""
    return list(result.get(name) or ())


def _series(candidate: Row) -> str:
    """The line that a candidate belongs to: its drafter, with the verification if that isn't the usual one."""
    verification = candidate.get("verification")
    return str(candidate["drafter"]) + (f" {verification}" if verification not in (None, "", "coupled") else "")


def _named(row: Row) -> Row:
    """Return a row of the result with a name for its case, which charts tell it by."""
    return {**row, "case": str(row.get("case") or MISSING)}


def _candidates(result: Result) -> list[Row]:
    return [_named(each) for each in rows(result, "candidates") if each.get("drafter") not in (None, "none")]


def _measured(result: Result) -> list[Row]:
    return [each for each in _candidates(result) if each.get("measured")]


def _batches(result: Result) -> list[Row]:
    found = [_named(each) for each in rows(result, "batches")]
    return [each for each in found if each.get("speedup") is not None and each.get("batch_size") is not None]


def _look(index: int) -> tuple[str, str]:
    """Return a colour and a shape: of more than there are colours, no two have both."""
    return f"c{index % COLOURS}", SHAPES[(index + index // COLOURS) % len(SHAPES)]


def styles(result: Result) -> dict[str, tuple[str, str]]:
    """Return colour and shape of each drafter and of each measured case, which has the colour of its drafter."""
    series_of = {each["case"]: _series(each) for each in _candidates(result)}
    found = {name: _look(i) for i, name in enumerate(dict.fromkeys(map(_series, _candidates(result))))}
    for i, case in enumerate(dict.fromkeys(each["case"] for each in (*_measured(result), *_batches(result)))):
        colour, shape = _look(i)
        found.setdefault(case, (found[series_of[case]][0] if case in series_of else colour, shape))
    return found


# --- how figures are written -------------------------------------------------------------------------------------


def format_speedup(value: float | None) -> str:
    """2.31x."""
    return MISSING if value is None else f"{value:.2f}x"


def format_interval(row: Row | None) -> str:
    """(2.10 to 2.52), of a row with low and high; nothing where one is missing."""
    low, high = (row or {}).get("low"), (row or {}).get("high")
    return "" if low is None or high is None else f"({low:.2f} to {high:.2f})"


def format_number(value: float | None, digits: int = 2) -> str:
    """1.23."""
    return MISSING if value is None else f"{value:.{digits}f}"


def format_percent(value: float | None) -> str:
    """78%."""
    return MISSING if value is None else f"{value:.0%}"


def format_error(value: float | None) -> str:
    """+3.8%: a prediction's, with its sign."""
    return MISSING if value is None else f"{value:+.1%}"


def format_ms(seconds: float | None) -> str:
    """12.3 ms."""
    return MISSING if seconds is None else f"{seconds * 1000:.1f} ms"


# --- charts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """A chart: ``unit`` is written above its vertical axis, ``caption`` says how to read it and what it shows."""

    name: str
    title: str
    unit: str
    caption: str
    layers: Sequence[Row]
    height: int = 300

    def spec(self, width: int | str) -> Row:
        """Return the Vega-Lite specification, ``width`` pixels wide, or as wide as its "container"."""
        small: Row = {"anchor": "start", "frame": "group", "fontWeight": "normal", "color": "var(--muted)"}
        if width == "container":  # the page has the title
            title = {**small, "text": self.unit, "fontSize": 12}
        else:
            subtitle = {"subtitle": self.unit, "subtitleColor": "var(--muted)", "subtitlePadding": 6}
            title = {**small, "text": self.title, "fontSize": 16, "color": "var(--ink)", **subtitle}
        return {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "description": f"{self.title}. {self.caption}",
            "title": {**title, "offset": 10},
            "width": width,
            "height": self.height,
            "autosize": {"type": "fit-x", "contains": "padding"},
            "padding": 2 if width == "container" else 16,
            "layer": list(self.layers),
            "config": {
                "font": FONT,
                "background": "transparent" if width == "container" else "var(--card)",
                "view": {"stroke": None},
                "axis": _AXIS_STYLE,
                "legend": _LEGEND_STYLE,
            },
        }


_AXIS_STYLE: Row = {
    "labelColor": "var(--muted)",
    "titleColor": "var(--muted)",
    "gridColor": "var(--grid)",
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
    "titlePadding": 8,
    "labelPadding": 6,
    "domain": False,
    "ticks": False,
}
_LEGEND_STYLE: Row = {
    "title": None,
    "orient": "bottom",
    "direction": "horizontal",
    "labelColor": "var(--ink)",
    "labelFontSize": 12,
    "symbolSize": 70,
    "symbolLimit": 0,
    "columnPadding": 14,
    "rowPadding": 4,
    "offset": 14,
}


def charts(result: Result) -> list[Chart]:
    """Return the charts that there is data for, in the order of the page."""
    makers: tuple[Callable[[Result], Chart | None], ...] = (
        _acceptance_by_position,
        _tokens_against_k,
        _speedup_against_k,
        _tpot,
        _costs,
        _by_context,
        _by_batch,
        _predicted_against_measured,
    )
    return [chart for make in makers if (chart := make(result)) is not None]


def _layer(name: str, values: Sequence[Row], mark: Row, encoding: Row) -> Row:
    """A layer with its own data set, whose marks say their row's ``label`` to readers and to the pointer."""
    if values and "label" in values[0]:
        encoding = {**encoding, "tooltip": {"field": "label"}, "description": {"field": "label"}}
    return {"data": {"name": name, "values": list(values)}, "mark": mark, "encoding": encoding}


def _axis(title: str | None = None, scale: Row | None = None, *, field: str = "x", **axis: Any) -> Row:
    return {"field": field, "type": "quantitative", "title": title, "scale": scale or {}, "axis": axis}


def _speedup_axis() -> Row:
    scale = {"zero": False, "nice": True, "padding": 6}
    return _axis(None, scale, field="y", labelExpr="format(datum.value, '.2~f') + 'x'", tickCount=6)


def _row(series: str, x: Any, y: float, label: str, interval: Row | None = None) -> Row:
    """A row of a chart's data."""
    ends = {"low": interval.get("low"), "high": interval.get("high")} if interval else {}
    return {"series": series, "x": x, "y": y, "label": label, **ends}


@dataclass(frozen=True)
class _Painter:
    """Makes the layers of a chart, all with the same series, so that they share axes and one legend."""

    names: Sequence[str]
    styles: Mapping[str, tuple[str, str]]
    x: Row
    y: Row

    def _encoding(self, *, shape: bool) -> Row:
        longest = max(map(len, self.names), default=1)
        # As many columns as fit: a legend that is wider than its chart would be cut.
        columns = f"max(1, floor(width / {longest * 6.6 + 34:.0f}))"
        legend = {"columns": {"expr": columns}, "labelLimit": {"expr": "max(80, width - 20)"}}
        encoding = {"x": self.x, "y": self.y}
        for part, channel in enumerate(("color", "shape") if shape else ("color",)):
            found = [self.styles[name][part] for name in self.names]
            scale = {"domain": list(self.names), "range": found if part else [f"var(--{each})" for each in found]}
            encoding[channel] = {"field": "series", "type": "nominal", "scale": scale, "legend": legend}
        return encoding

    def lines(self, name: str, values: Sequence[Row]) -> list[Row]:
        """A line for each series."""
        mark = {"type": "line", "strokeWidth": 1.5, "opacity": 1, "aria": False}  # its points speak
        values = [{key: each for key, each in row.items() if key != "label"} for row in values]
        return [_layer(name, values, mark, self._encoding(shape=False))] if values else []

    def dots(self, name: str, values: Sequence[Row]) -> list[Row]:
        """Small points: what was predicted."""
        mark = {"type": "point", "filled": True, "size": 24, "opacity": 1}
        return [_layer(name, values, mark, self._encoding(shape=True))] if values else []

    def points(self, name: str, values: Sequence[Row]) -> list[Row]:
        """Large points, with the bars of their intervals: what was measured."""
        mark = {"type": "point", "filled": True, "size": 110, "opacity": 1, "stroke": "var(--card)", "strokeWidth": 1.2}
        layers = [_layer(name, values, mark, self._encoding(shape=True))] if values else []
        bars = [each for each in values if each.get("low") is not None and each.get("high") is not None]
        if bars:
            encoding = {**self._encoding(shape=False), "y": {**self.y, "field": "low"}, "y2": {"field": "high"}}
            layers.insert(0, _layer(f"{name}-intervals", bars, {"type": "rule", "strokeWidth": 2}, encoding))
        return layers


def _plain_line() -> list[Row]:
    """The line that plain decoding is."""
    y = {"datum": 1, "type": "quantitative"}
    rule = {"type": "rule", "color": "var(--ink)", "strokeDash": [5, 4], "strokeWidth": 1.2}
    text = {"type": "text", "align": "left", "baseline": "top", "dx": 2, "dy": 4, "fontSize": 11}
    text |= {"text": "plain decoding = 1x", "color": "var(--muted)"}
    return [_layer("plain", [{}], rule, {"y": y}), _layer("plain-name", [{}], text, {"y": y, "x": {"value": 0}})]


def _some(numbers: Iterable[int], most: int = 8) -> list[int]:
    """Return the numbers in order; of many, evenly some, for an axis."""
    ordered = sorted(numbers)
    return ordered[:: math.ceil(len(ordered) / most) or 1]


def _acceptance_by_position(result: Result) -> Chart | None:
    # One candidate of each drafter: the largest k, as an adaptive one drafts far only where it is sure. Predicted
    # first: replay sees more prompts.
    best: dict[str, Sequence[float | None]] = {}
    for each in sorted(_candidates(result), key=lambda each: each.get("num_speculative_tokens") is None):
        if each.get("num_speculative_tokens") is None and _series(each) in best:
            continue
        for source in ("predicted", "measured"):
            found = each.get(source) or {}
            reached = found.get("per_position_reached") or itertools.repeat(LEAST_REACHED)
            positions = zip(found.get("per_position_acceptance") or (), reached, strict=False)
            rates = [rate for rate, _ in itertools.takewhile(lambda each: (each[1] or 0) >= LEAST_REACHED, positions)]
            if len(rates) > len(best.get(_series(each), ())):
                best[_series(each)] = rates
    values = [
        _row(name, i, rate, f"{name}, position {i}: {format_percent(rate)}")
        for name, rates in best.items()
        for i, rate in enumerate(rates, 1)
        if rate is not None
    ]
    if not values:
        return None
    x = _axis("position in the draft", {"nice": False, "zero": False, "padding": 8}, grid=False, format="d")
    x["axis"]["values"] = _some({each["x"] for each in values})
    y = _axis(None, {"domain": [0, 1]}, field="y", format=".0%", tickCount=5)
    paint = _Painter(list(best), styles(result), x, y)
    return Chart(
        "acceptance-by-position",
        "Acceptance by position",
        "accepted at a position / reached it",
        "How often the draft token at each position is accepted, of those that were reached, for each drafter. "
        f"Positions that fewer than {LEAST_REACHED} rounds reached are left out.",
        paint.lines("lines", values) + paint.dots("acceptance", values),
    )


def _against_k(result: Result, key: str) -> list[Row]:
    """Return layers with ``key`` against k: lines predicted, points measured; adaptive settings beside them."""
    found = [
        (each, source, each[source])
        for each in _candidates(result)
        for source in ("predicted", "measured")
        if (each.get(source) or {}).get(key) is not None
    ]
    names = list(dict.fromkeys(_series(each) for each, _, _ in found))
    ks = {k for each, _, _ in found if (k := each.get("num_speculative_tokens")) is not None}
    adaptive = list(dict.fromkeys(each["case"] for each, _, _ in found if each.get("num_speculative_tokens") is None))
    last = max(ks, default=0)
    unit = max(last, 4) / 16  # on the axis, what reads as one step
    data: dict[str, list[Row]] = {"predicted": [], "predicted-adaptive": [], "measured": []}
    for each, source, figures in found:
        k, series = each.get("num_speculative_tokens"), _series(each)
        if k is None:  # a column of their own
            x = last + (1.8 + 0.9 * adaptive.index(each["case"])) * unit
        elif source == "measured":  # side by side where several have one k
            x = k + 0.14 * unit * (names.index(series) - (len(names) - 1) / 2)
        else:
            x = k
        speedup = key == "speedup"
        text = f"{format_speedup(figures[key])} {format_interval(figures)}" if speedup else format_number(figures[key])
        row = _row(series, x, figures[key], f"{each['case']}, {source}: {text}".rstrip(), figures if speedup else None)
        name = "predicted-adaptive" if k is None and source == "predicted" else source
        data[name].append({**row, "case": each["case"]})
    x_axis = _axis("k (num_speculative_tokens)", {"nice": False, "zero": False, "padding": 10}, grid=False, format="d")
    x_axis["axis"]["values"] = _some(ks)
    layers = []
    if adaptive:
        x_axis["axis"]["values"].append(last + (1.8 + 0.45 * (len(adaptive) - 1)) * unit)
        x_axis["axis"]["labelExpr"] = f"datum.value > {last} ? 'adaptive' : datum.label"
        edge = {"type": "rule", "color": "var(--grid)", "strokeWidth": 1.5}
        layers = [_layer("edge", [{"x": last + 0.9 * unit}], edge, {"x": x_axis})] if ks else []
    y_axis = _speedup_axis() if key == "speedup" else _axis(None, _speedup_axis()["scale"], field="y", tickCount=6)
    paint = _Painter(names, styles(result), x_axis, y_axis)
    layers += paint.lines("lines", data["predicted"])
    for name in ("predicted", "predicted-adaptive"):
        layers += paint.dots(name, data[name])
    return layers + paint.points("measured", data["measured"]) if found else []


def _tokens_against_k(result: Result) -> Chart | None:
    layers = _against_k(result, "tokens_per_target_call")
    caption = "Lines: predicted by replay. Large points: measured. Plain decoding is 1.00."
    name, title = "tokens-against-k", "Tokens per target call against k"
    return Chart(name, title, "tokens per target call", caption, layers) if layers else None


def _speedup_against_k(result: Result) -> Chart | None:
    layers = _against_k(result, "speedup")
    caption = "Lines: predicted from acceptance and costs. Large points: measured, with 95 % intervals over prompts."
    name, title = "speedup-against-k", "Speed-up against k"
    return Chart(name, title, "plain TPOT / TPOT", caption, [*layers, *_plain_line()]) if layers else None


def _tpot(result: Result) -> Chart | None:
    cases = [("plain", "ink", (result.get("plain") or {}).get("tpot_s"))]
    cases += [
        (each["case"], styles(result)[each["case"]][0], each["measured"].get("tpot_s")) for each in _measured(result)
    ]
    strips: list[Row] = []
    boxes: list[Row] = []
    for case, colour, found in cases:
        times = [each * 1000 for each in found or () if each is not None]
        if not times:
            continue
        first, middle, third = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        strips += [
            {"case": case, "x": each, "label": f"{case}: {each:.1f} ms", "paint": f"var(--{colour})"} for each in times
        ]
        label = f"{case}, median {middle:.1f} ms"
        boxes.append(
            {"case": case, "x": middle, "low": first, "high": third, "label": label, "paint": f"var(--{colour})"}
        )
    if not boxes:
        return None
    # Not a sort order: Vega-Lite would write the names into an expression, and a name may hold anything.
    y: Row = {"field": "case", "type": "nominal", "title": None, "axis": None}
    y["scale"] = {"domain": [each["case"] for each in boxes]}
    x = _axis("milliseconds", {"zero": True, "nice": True}, tickCount=6)
    own = {"x": x, "y": y, "color": {"field": "paint", "type": "nominal", "scale": None}}
    between = {**own, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    name = {
        "type": "text",
        "align": "left",
        "baseline": "bottom",
        "dy": -9,
        "dx": 1,
        "fontSize": 12,
        "color": "var(--ink)",
    }
    return Chart(
        "tpot",
        "TPOT of each prompt",
        "time per output token",
        "Each thin stroke is a prompt, the bar holds the middle half of them, and the tall stroke is the median.",
        [
            _layer("quartiles", boxes, {"type": "bar", "height": 12, "opacity": 0.3}, between),
            _layer("tpot", strips, {"type": "tick", "size": 12, "thickness": 1, "opacity": 0.6}, own),
            _layer("median", boxes, {"type": "tick", "size": 20, "thickness": 3, "opacity": 1}, own),
            _layer("names", boxes, name, {"y": y, "x": {"value": 0}, "text": {"field": "label"}}),
        ],
        44 * len(boxes),
    )


def _costs(result: Result) -> Chart | None:
    costs = result.get("costs") or {}
    counts = costs.get("rows") or []
    curves = dict(zip(costs.get("contexts") or (), costs.get("seconds") or (), strict=False))
    names = {context: f"{context} tokens of context" for context in curves}
    values = [
        _row(names[context], count, each * 1000, f"{count} rows, {names[context]}: {format_ms(each)}")
        for context, curve in curves.items()
        for count, each in zip(counts, curve, strict=False)
        if each is not None
    ]
    if not values:
        return None
    looks = {name: _look(i) for i, name in enumerate(names.values())}
    x = _axis(
        "rows in one target call", {"type": "log", "base": 2, "nice": False}, values=counts, grid=False, format="d"
    )
    paint = _Painter(list(names.values()), looks, x, _axis(None, {"zero": True}, field="y", tickCount=6))
    return Chart(
        "costs",
        "What a target call costs",
        "milliseconds",
        "The time of one target call against its rows (tokens checked at once), measured on this machine.",
        paint.lines("lines", values) + paint.dots("costs", values),
    )


def _by_context(result: Result) -> Chart | None:
    parts = [
        (each["case"], part)
        for each in _measured(result)
        for part in each["measured"].get("by_context") or ()
        if part.get("speedup") is not None and part.get("from") is not None
    ]
    names = list(dict.fromkeys(case for case, _ in parts))
    bins = sorted(
        {(part["from"], part.get("to")) for _, part in parts}, key=lambda ends: (ends[0], ends[1] or math.inf)
    )
    one = [f"{start}+" if end is None else f"{start}–{end}" for start, end in bins]
    values = []
    for case, part in parts:
        place = bins.index((part["from"], part.get("to")))
        x = place + 0.7 * ((names.index(case) + 0.5) / len(names) - 0.5)  # side by side
        text = f"{case}, context {one[place]}: {format_speedup(part['speedup'])} {format_interval(part)}"
        values.append(_row(case, x, part["speedup"], text.rstrip(), part))
    if not values:
        return None
    x_axis = _axis("tokens of context", {"domain": [-0.5, len(bins) - 0.5], "nice": False}, grid=False)
    x_axis["axis"] |= {"values": list(range(len(bins))), "labelOverlap": True, "labelSeparation": 4}
    two = [each.replace("–", "–\n").split("\n") for each in one]
    narrow = f"width < {70 * len(bins) + 60}"  # there labels have two lines
    x_axis["axis"]["labelExpr"] = f"({narrow} ? {json.dumps(two)} : {json.dumps(one)})[datum.value]"
    paint = _Painter(names, styles(result), x_axis, _speedup_axis())
    return Chart(
        "speedup-by-context",
        "Speed-up by context length",
        "plain TPOT / TPOT",
        "Measured on the tokens that were written with so much context before them, with 95 % intervals.",
        paint.points("context", values) + _plain_line(),
    )


def _by_batch(result: Result) -> Chart | None:
    found = _batches(result)
    if not found:
        return None
    # A line for each drafter, whose best k falls with the batch; where it stands twice at one place, for each case.
    series_of = {each["case"]: _series(each) for each in _candidates(result)}
    places = [(each["batch_size"], bool(each.get("measured")), series_of.get(each["case"])) for each in found]
    if None in {series for *_, series in places} or len(set(places)) < len(places):
        series_of = {each["case"]: each["case"] for each in found}
    names = list(dict.fromkeys(series_of[each["case"]] for each in found))
    data: dict[bool, list[Row]] = {False: [], True: []}
    for each in found:
        measured, size = bool(each.get("measured")), each["batch_size"]
        what = "measured" if measured else "predicted"
        text = f"{each['case']}, batch of {size}, {what}: {format_speedup(each['speedup'])} {format_interval(each)}"
        row = _row(series_of[each["case"]], size, each["speedup"], text.rstrip(), each if measured else None)
        data[measured].append({**row, "case": each["case"]})
    sizes = sorted({each["batch_size"] for each in found})
    scale = {"type": "log", "base": 2, "nice": False, "padding": 12}
    x = _axis("batch size", scale, values=sizes, grid=False, format="d")
    paint = _Painter(names, styles(result), x, _speedup_axis())
    return Chart(
        "speedup-by-batch",
        "Speed-up by batch size",
        "plain TPOT / TPOT",
        f"Lines: predicted. {'Large points: measured, with 95 % intervals.' if data[True] else 'None was measured.'}",
        [
            *paint.lines("lines", data[False]),
            *paint.dots("predicted", data[False]),
            *paint.points("measured", data[True]),
            *_plain_line(),
        ],
    )


def _predicted_against_measured(result: Result) -> Chart | None:
    values = []
    for each in _measured(result):
        error, speedup = each["measured"].get("prediction_error"), each["measured"].get("speedup")
        if error is None or speedup is None:
            continue
        predicted = speedup * (1 + error)  # on the prompts that were measured
        text = f"{each['case']}: predicted {format_speedup(predicted)}, measured {format_speedup(speedup)}"
        values.append(
            _row(
                each["case"],
                predicted,
                speedup,
                f"{text} {format_interval(each['measured'])}".rstrip(),
                each["measured"],
            )
        )
    if not values:
        return None
    limit = (result.get("prediction") or {}).get("limit")
    ends = [f(each["x"] for each in values) * by for f, by in ((min, 0.95), (max, 1.05))]
    same = [
        {"x": end, "y": end, "from": end / (1 + (limit or 0)), "to": end / (1 - min(limit or 0, 0.9))} for end in ends
    ]
    x = _axis("predicted speed-up", {"zero": False, "nice": False}, grid=False, tickCount=6)
    x["axis"]["labelExpr"] = _speedup_axis()["axis"]["labelExpr"]
    y = _speedup_axis()
    band = {"x": x, "y": {**y, "field": "from"}, "y2": {"field": "to"}}
    line = {"type": "line", "color": "var(--muted)", "strokeDash": [5, 4], "strokeWidth": 1.2}
    paint = _Painter([each["series"] for each in values], styles(result), x, y)
    within = f" The band holds errors of up to {limit:.0%}." if limit else ""
    return Chart(
        "predicted-against-measured",
        "Predicted against measured",
        "measured speed-up",
        f"On the dashed line the prediction was right; above it, the setting was faster than predicted.{within}",
        [
            *([_layer("band", same, {"type": "area", "color": "var(--grid)", "opacity": 0.6}, band)] if limit else []),
            _layer("right", same, line, {"x": x, "y": y}),
            *paint.points("measured", values),
        ],
    )

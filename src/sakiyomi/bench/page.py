"""A tuning's result as one HTML page that needs no network."""

from __future__ import annotations

import base64
import functools
import hashlib
import statistics
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, Template, Undefined

from sakiyomi.bench import charts
from sakiyomi.bench.charts import COLOURS, MISSING, Result, require_charts, write_plots
from sakiyomi.files import replace_file

__all__ = ["LOST_PROMPTS", "VERDICTS", "require_charts", "write_page", "write_plots"]

LOST_PROMPTS = 50
"""So many prompts where drafting lost are listed at most."""

VERDICTS = {"faster": "▲ faster", "slower": "▼ slower", "unclear": "◆ unclear", "off": "■ off"}
_UNDERLINES = (
    "solid 2px",
    "dashed 2px",
    "dotted 2px",
    "double 2px",
    "wavy 1px",
    "solid 4px",
    "dashed 4px",
    "dotted 4px",
)


def write_page(result: Result, path: Path) -> None:
    """Write the page of what ``sakiyomi tune --json`` prints: everything in one file, which loads nothing.

    Raises OptionError where the package that draws charts is missing, or the file can't be written.
    """
    require_charts()
    clean = charts.clean(result)
    styles = charts.styles(clean)
    figures = [(each, each.spec("container")) for each in charts.charts(clean)]
    samples = charts.rows(clean, "samples")
    drafted = dict.fromkeys(name for each in samples for _, name in each.get("tokens") or () if name)
    lost = [each for each in charts.rows(clean, "prompts") if each.get("lost")]
    page = _template().render(
        result=clean,
        figures=figures,
        vega=_vega() if figures else "",
        licences=_text("vega_licences.txt"),
        light=charts.LIGHT,
        dark=charts.DARK,
        font=charts.FONT,
        marks={
            name: ((i + i // COLOURS) % len(_UNDERLINES), styles.get(name, (f"c{i % COLOURS}",))[0])
            for i, name in enumerate(drafted)
        },
        underlines=_UNDERLINES,
        lost=lost[:LOST_PROMPTS],
        more_lost=max(0, len(lost) - LOST_PROMPTS),
    )
    replace_file(path, lambda place: place.write_text(page, encoding="utf-8", newline="\n"))


@functools.cache
def _vega() -> str:
    """The JavaScript that draws charts, for a script tag."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


def _hash(script: str) -> str:
    """The name of a script in a content security policy: no other script runs in the page, whatever texts hold."""
    return base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()


def _known(write: Callable[..., Any]) -> Callable[..., Any]:
    """Have a filter take what is not there like a null."""
    return lambda value, *options: write(None if isinstance(value, Undefined) else value, *options)


def _text(name: str) -> str:
    return files("sakiyomi.bench").joinpath(name).read_text(encoding="utf-8")


def _median(values: list[float | None] | None) -> float | None:
    known = [value for value in values or () if value is not None]
    return statistics.median(known) if known else None


@functools.cache
def _template() -> Template:
    """The page's template, with the formats as filters; texts are escaped."""
    environment = Environment(autoescape=True, undefined=ChainableUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # in the order of the dict
    filters: dict[str, Callable[..., Any]] = {
        "speedup": charts.format_speedup,
        "interval": charts.format_interval,
        "number": charts.format_number,
        "percent": charts.format_percent,
        "error": charts.format_error,
        "ms": charts.format_ms,
        "verdict": lambda word: VERDICTS.get(word, word or MISSING),
        "or_dash": lambda value: MISSING if value in (None, "", [], {}) else value,
        "median": _median,
        "missing": lambda value: value is None,
        "hash": _hash,
    }
    environment.filters |= {name: _known(write) for name, write in filters.items()}
    return environment.from_string(_text("page.html"))

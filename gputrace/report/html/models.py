"""Models of Bokeh's script, as its documents hold them.

Bokeh's own Python is left out: its import and its checks of each value take a second a page. What
the script has a default for need not be said.
"""

from __future__ import annotations

import gzip
import sys
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np


class Model:
    """Model by its name in Bokeh; its properties are read and set as attributes."""

    def __init__(self, kind: str, /, **properties: Any) -> None:
        vars(self).update(kind=kind, properties=properties)

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["properties"][name]
        except KeyError:
            raise AttributeError(f"{self.kind} was given no {name}") from None

    def __setattr__(self, name: str, value: object) -> None:
        self.properties[name] = value

    def update(self, **properties: Any) -> None:
        self.properties.update(properties)


Range = Model | tuple[float, float] | Sequence[Any] | None
"""Range of an axis: a model, its two ends, the names of rows from the bottom, or what is drawn."""


class Chart(Model):
    """Figure in the style and width of the page, with axes at the bottom and on the left."""

    def __init__(
        self,
        name: str,
        height: int,
        *,
        x_range: Range = None,
        y_range: Range = None,
        x_axis_label: str | None = None,
        y_axis_label: str | None = None,
        tools: Sequence[str] = ("PanTool", "BoxZoomTool", "ResetTool"),
        **properties: Any,
    ) -> None:
        x, y = map(_as_range, (x_range, y_range))
        below, left = _axis(x, x_axis_label), _axis(y, y_axis_label)
        super().__init__(
            "Figure",
            name=name,
            height=height,
            sizing_mode="stretch_width",
            x_range=x,
            y_range=y,
            x_scale=Model(_kind_for(x, "Scale")),
            y_scale=Model(_kind_for(y, "Scale")),
            below=[below],
            left=[left],
            right=[],
            center=[Model("Grid", axis=below), Model("Grid", axis=left, dimension=1)],
            renderers=[],
            toolbar=Model("Toolbar", logo=None, tools=[]),
            **{
                "background_fill_alpha": 0,
                "border_fill_alpha": 0,
                "outline_line_alpha": 0,
                "lod_threshold": None,
                "toolbar_location": "above",
                **properties,
            },
        )
        for grid in self.center:
            grid.grid_line_alpha = 0.25
        for tool in tools:
            across = {} if tool == "ResetTool" else {"dimensions": "width"}
            self.toolbar.tools.append(Model(tool, **across))

    @property
    def xaxis(self) -> Model:
        axis: Model = self.below[0]
        return axis

    @property
    def yaxis(self) -> Model:
        axis: Model = self.left[0]
        return axis

    def hide_grid(self, *, x: bool = True) -> None:
        """Hide the lines across the chart; those of the axis at the bottom may stay."""
        for grid in self.center[0 if x else 1 :]:
            grid.visible = False

    def draw(self, glyph: str, source: Model, **looks: Any) -> Model:
        """Draw a glyph for each row of a source; a look that is a column's name is that column."""
        columns = dict(source.data["entries"])
        given = {
            name: field(look) if isinstance(look, str) and look in columns else look
            for name, look in looks.items()
        }
        drawn = Model("GlyphRenderer", data_source=source, glyph=Model(glyph, **given))
        self.renderers.append(drawn)
        return drawn

    def draw_stacked_bars(self, source: Model, colors: Mapping[str, str]) -> list[Model]:
        """Draw a bar for each row of a source, stacked from columns, in the order of colours."""
        names = list(colors)
        ends = [
            {"type": "expr", "expr": Model("Stack", fields=names[:count])}
            for count in range(len(names) + 1)
        ]
        look = {"y": "row", "height": 0.8, "line_color": "#808080", "line_width": 0.5}
        return [
            self.draw("HBar", source, left=left, right=right, fill_color=color, **look)
            for left, right, color in zip(ends, ends[1:], colors.values(), strict=False)
        ]

    def add_tips(
        self, drawn: Model, tips: Sequence[tuple[str, str]], attachment: str = "horizontal"
    ) -> None:
        """Show words and values beside the pointer over a glyph."""
        tip = Model("HoverTool", renderers=[drawn], tooltips=tips, visible=False)
        tip.attachment = attachment
        self.toolbar.tools.append(tip)


def _as_range(given: Range) -> Model:
    if given is None:
        return Model("DataRange1d")
    if isinstance(given, Model):
        return given
    if isinstance(given, tuple):
        return Model("Range1d", start=given[0], end=given[1])
    return Model("FactorRange", factors=given)


def _kind_for(shown: Model, what: str) -> str:
    return f"{'Categorical' if shown.kind == 'FactorRange' else 'Linear'}{what}"


def _axis(shown: Model, label: str | None) -> Model:
    return Model(_kind_for(shown, "Axis"), axis_label=label)


def source(columns: Mapping[str, Any], **properties: Any) -> Model:
    """Return a table of columns, each a list or an array, for glyphs and scripts."""
    return Model("ColumnDataSource", data=mapping(columns), **properties)


def mapping(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a property that is a dictionary."""
    return {"type": "map", "entries": list(values.items())}


def field(column: str) -> dict[str, str]:
    """Return a look that a column holds for each row."""
    return {"type": "field", "field": column}


def value(text: str) -> dict[str, str]:
    """Return a text that is no column's name, where Bokeh would take it for one."""
    return {"type": "value", "value": text}


def fixed_ticks(places: Sequence[float]) -> Model:
    """Return ticks at these places only."""
    return Model("FixedTicker", ticks=places, minor_ticks=[])


_NAME: Final = "page"
"""Name of the only document."""


def write_documents(charts: Iterable[Chart], title: str) -> bytes:
    """Return ``docs`` and ``items`` in JSON, as Bokeh's ``embed_items`` takes them.

    The elements of charts have the ids that `element_id` tells.
    """
    # A page's script waits for a document with anything in it.
    roots: Sequence[Model] = [*charts] or [Model("Spacer", name="")]
    ids = {id(root): f"g{number}" for number, root in enumerate(roots)}
    written = set[int]()

    def encode(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return {
                "type": "ndarray",
                "array": {"type": "bytes", "data": compress(value.tobytes())},
                "shape": value.shape,
                "dtype": value.dtype.name,
                "order": sys.byteorder,
            }
        name = ids.setdefault(id(value), f"g{len(ids)}")
        if id(value) in written:
            return {"id": name}
        written.add(id(value))
        attributes = value.properties
        return {"type": "object", "name": value.kind, "id": name, "attributes": attributes}

    places = {ids[id(root)]: element_id(root.name) for root in roots}
    document = {
        "version": version("bokeh"),
        "title": title,
        "config": Model("DocumentConfig"),
        "roots": roots,
    }
    items = [{"docid": _NAME, "roots": places, "root_ids": list(places)}]
    return msgspec.json.encode({"docs": {_NAME: document}, "items": items}, enc_hook=encode)


def read_document(written: bytes) -> Any:
    """Return the only document of what `write_documents` wrote."""
    return msgspec.json.decode(written)["docs"][_NAME]


def compress(content: bytes) -> str:
    """Return bytes compressed by gzip and in base64, the same each time."""
    return b64encode(gzip.compress(content, 6, mtime=0)).decode()


def element_id(chart: str) -> str:
    """Return the id of the element that a chart by this name is drawn into."""
    return f"plot-{chart}"


def library() -> str:
    """Return Bokeh's script as it is installed."""
    package = find_spec("bokeh")
    assert package is not None
    assert package.origin is not None
    script = Path(package.origin).parent / "server" / "static" / "js" / "bokeh.min.js"
    return script.read_text(encoding="utf-8")

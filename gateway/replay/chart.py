"""Pictures as SVG, written by hand: panels with axes, lines, dots, bars and levels. No library, the same bytes each time.

Light and dark readers see the same: the page is white, inks are dark, and series differ by shape (line, dots, dashes)
as well as by colour (Okabe and Ito's, told apart by colour-blind readers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT = 980, 190
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 26, 34
LEGEND_CHARS = 32
"""A longer name is cut in its middle: engines are often told apart by the end."""
LABEL_HEIGHT = 12
POINTS_MAX = 1500
"""Points drawn of one line; a longer one is thinned to the extremes of its stretches, so that no peak is lost."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A series joined by lines, or `dots`; `dashed` for bounds and objectives."""

    name: str
    points: Sequence[Point]
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. log_y, log_x: decades instead of even steps (values <= 0 are left out). levels: (name, y)."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    x_unit: str = "s"
    log_y: bool = False
    log_x: bool = False
    levels: Sequence[tuple[str, float]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, one a name. levels: (name, x)."""

    title: str
    rows: Sequence[tuple[str, float]]
    unit: str = ""
    levels: Sequence[tuple[str, float]] = field(default_factory=tuple)


def svg(title: str, panels: Sequence[Panel | Bars]) -> str:
    """A picture of panels one below another; those of one kind of x share its range, so that one moment is one column."""
    heights = [HEIGHT if isinstance(one, Panel) else _bars_height(one) for one in panels]
    height_px = 34 + sum(heights)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height_px}" width="{WIDTH}"',
        f' height="{height_px}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" fill="#111">{escape(title)}</text>',
    ]
    top = 34
    for panel, height in zip(panels, heights, strict=True):
        draw = _panel(panel, _xs(panel, panels)) if isinstance(panel, Panel) else _bars(panel)
        parts.append(f'<g transform="translate(0 {top})">{draw}</g>')
        top += height
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


class _Scale:
    """Values to pixels, even or by decades, with round marks."""

    def __init__(self, values: Sequence[float], low_px: float, high_px: float, *, log: bool, from_zero: bool) -> None:
        self.log = log
        low = min(values, default=1.0 if log else 0.0)
        high = max(values, default=10.0 if log else 1.0)
        if log:
            self.low, self.high = float(math.floor(math.log10(low))), float(math.ceil(math.log10(high)))
            self.high = max(self.high, self.low + 1)
        else:
            self.low = 0.0 if from_zero else low
            self.high = high if high > self.low else self.low + 1.0
        self._low_px, self._high_px = low_px, high_px

    def px(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        return self._low_px + (at - self.low) / (self.high - self.low) * (self._high_px - self._low_px)

    def marks(self) -> list[float]:
        if self.log:
            return [10.0**power for power in range(int(self.low), int(self.high) + 1)]
        step = _round_step((self.high - self.low) / 4)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _xs(panel: Panel, panels: Sequence[Panel | Bars]) -> list[float]:
    alike = [one for one in panels if isinstance(one, Panel) and (one.x_unit, one.log_x) == (panel.x_unit, panel.log_x)]
    return [x for one in alike for line in one.lines for x, _ in line.points if x > 0 or not one.log_x]


def _panel(panel: Panel, xs: Sequence[float]) -> str:
    lines = [_cleaned(line, panel) for line in panel.lines]
    ys = [y for line in lines for _, y in line.points] + [y for _, y in panel.levels if y > 0 or not panel.log_y]
    across = _Scale(xs, LEFT, WIDTH - RIGHT, log=panel.log_x, from_zero=not panel.log_x)
    up = _Scale(ys, HEIGHT - BOTTOM, TOP, log=panel.log_y, from_zero=True)
    parts = [f'<text x="{LEFT}" y="{TOP - 8}" fill="#111" font-weight="bold">{escape(panel.title)}</text>']
    for mark in up.marks():
        y = up.px(mark)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{_shown(mark)} {escape(panel.unit)}</text>'
        )
    for mark in across.marks():
        x = across.px(mark)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}" stroke="#444"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#444">'
            f"{_shown(mark)} {escape(panel.x_unit)}</text>"
        )
    for number, line in enumerate(lines):
        ink = INKS[number % len(INKS)]
        parts.append(_line(line, ink, across, up))
        parts.append(_legend(number, line.name, ink))
    for number, (name, level) in enumerate(panel.levels, len(lines)):
        y = up.px(level)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#a00" stroke-dasharray="6 3"/>'
        )
        parts.append(_legend(number, name, "#aa0000"))
    return "".join(parts)


def _cleaned(line: Line, panel: Panel) -> Line:
    points = [(x, y) for x, y in line.points if (y > 0 or not panel.log_y) and (x > 0 or not panel.log_x)]
    return Line(line.name, points if line.dots else _thinned(points), line.dots, line.dashed)


def _thinned(points: list[Point]) -> list[Point]:
    """At most about POINTS_MAX points: the lowest and the highest of each stretch, in their order."""
    if len(points) <= POINTS_MAX:
        return points
    stretch = math.ceil(2 * len(points) / POINTS_MAX)
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        piece = points[start : start + stretch]
        ends = {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])}
        kept.extend(sorted(ends))
    return kept


def _line(line: Line, ink: str, across: _Scale, up: _Scale) -> str:
    pixels = [(across.px(x), up.px(y)) for x, y in line.points]
    if line.dots:
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in pixels)
        return f'<path d="{path}" stroke="{ink}" stroke-width="2.4" stroke-linecap="round" opacity="0.5"/>'
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels) if pixels else ""
    dash = ' stroke-dasharray="5 3"' if line.dashed else ""
    return f'<path d="{path}" fill="none" stroke="{ink}" stroke-width="1.4"{dash}/>'


def _legend(number: int, name: str, ink: str) -> str:
    y = TOP + 6 + 15 * number
    if len(name) > LEGEND_CHARS:
        half = (LEGEND_CHARS - 1) // 2
        name = f"{name[:half]}\u2026{name[-half:]}"
    return (
        f'<rect x="{WIDTH - RIGHT + 8}" y="{y - 5}" width="12" height="4" fill="{ink}"/>'
        f'<text x="{WIDTH - RIGHT + 24}" y="{y}" fill="#111">{escape(name)}</text>'
    )


def _bars_height(bars: Bars) -> int:
    return 46 + 17 * len(bars.rows) + LABEL_HEIGHT * max(0, len(bars.levels) - 1)


def _bars(bars: Bars) -> str:
    left = 190
    values = [value for _, value in bars.rows] + [level for _, level in bars.levels]
    across = _Scale(values, left, WIDTH - 90, log=False, from_zero=True)
    bottom = 20 + 17 * len(bars.rows)
    parts = [f'<text x="{LEFT}" y="12" fill="#111" font-weight="bold">{escape(bars.title)}</text>']
    for number, (name, value) in enumerate(bars.rows):
        y, x = 20 + 17 * number, across.px(value)
        parts.append(
            f'<text x="{left - 6}" y="{y + 11}" text-anchor="end" fill="#111">{escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{max(0.0, x - left):.1f}" height="13" fill="{INKS[0]}"/>'
            f'<text x="{x + 4:.1f}" y="{y + 11}" fill="#111">{_shown(value)} {escape(bars.unit)}</text>'
        )
    for number, (name, level) in enumerate(bars.levels):
        x, y = across.px(level), bottom + 11 + LABEL_HEIGHT * number
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{y - 10}" stroke="#a00" stroke-dasharray="6 3"/>'
            f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#a00">{escape(name)}</text>'
        )
    return "".join(parts)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= step * (1 - 1e-9))


def _shown(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"

"""The picture of conformance: layers by properties, as SVG."""

from html import escape

from experiments.benchmark.results.files import Figures

CELL, LEFT, TOP = 18, 330, 170
COLOURS = {"equal": "#1b7837", "holds": "#7fbf7b", "fails": "#d7301f", "none": "#eeeeee"}
LEGEND = {
    "equal": "equal in every bit",
    "holds": "within the tolerance",
    "fails": "does not hold",
    "none": "not promised",
}


def draw_table(subjects: list[Figures]) -> str:
    """Return the picture: a row a layer, a column a property that some layer promises."""
    names = list(dict.fromkeys(name for each in subjects for name in each["outcomes"]))
    order = {name: at for at, name in enumerate(_in_order(subjects, names))}
    width, height = LEFT + CELL * len(order) + 120, TOP + CELL * len(subjects) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(_head(name, at) for name, at in order.items()),
    ]
    for row, subject in enumerate(subjects):
        y = TOP + CELL * row
        lines.append(f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{escape(subject["name"])}</text>')
        lines += [_cell(at, y, state_of(subject["outcomes"].get(name))) for name, at in order.items()]
    return "\n".join([*lines, *_legend(height), "</svg>"]) + "\n"


def state_of(outcome: Figures | None) -> str:
    """Return what a cell shows: equal, holds, fails or none."""
    if outcome is None:
        return "none"
    if "script" in outcome:
        return "fails"
    return "equal" if outcome["error"] == 0 else "holds"


def _in_order(subjects: list[Figures], names: list[str]) -> list[str]:
    """Return names in the order of the layer that has most, and the others behind them."""
    most = max(subjects, key=lambda each: len(each["outcomes"]))["outcomes"]
    return [*most, *(name for name in names if name not in most)]


def _head(name: str, at: int) -> str:
    x = LEFT + CELL * at + 13
    return f'<text transform="translate({x},{TOP - 6}) rotate(-60)">{escape(name.replace("_", " "))}</text>'


def _cell(at: int, y: int, state: str) -> str:
    x, size = LEFT + CELL * at, CELL - 2
    return f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{COLOURS[state]}"/>'


def _legend(height: int) -> list[str]:
    lines, x = [], LEFT
    for state, said in LEGEND.items():
        lines.append(_cell(0, height - 28, state).replace(f'x="{LEFT}"', f'x="{x}"'))
        lines.append(f'<text x="{x + CELL}" y="{height - 15}">{said}</text>')
        x += 135
    return lines

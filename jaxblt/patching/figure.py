"""Figures that a notebook shows by themselves, without pyplot and its global state."""

import io
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTEBOOK_DPI = 72
"""Dots an inch of the picture that a notebook keeps."""


def new_figure(**options: Any) -> "Figure":
    """Return a matplotlib figure that a notebook shows when it is a cell's last value.

    IPython draws a bare `Figure` only after pyplot was imported. This one draws itself.

    Args:
      **options: of `matplotlib.figure.Figure`.
    """
    return _shown_figure()(**options)


@cache
def _shown_figure() -> type["Figure"]:
    """Make the class on first use: matplotlib is an extra."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that IPython asks for its PNG."""

        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=NOTEBOOK_DPI)
            return picture.getvalue()

    return ShownFigure

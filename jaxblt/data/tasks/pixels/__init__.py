"""Images as rows of bytes: Pathfinder, drawn, and labelled images from arrays."""

from jaxblt.data.tasks.pixels.classes import PixelClasses
from jaxblt.data.tasks.pixels.pathfinder import Pathfinder
from jaxblt.data.tasks.pixels.picture import draw_sheet

__all__ = ["Pathfinder", "PixelClasses", "draw_sheet"]

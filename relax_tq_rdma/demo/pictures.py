"""Real photographs: the ones scikit-image ships inside its wheel. Nothing is downloaded.

The files are opened by path. ``skimage.data.*`` is not used, because it fetches over the network (pooch) what a build
left out; a missing file is an error here.
"""

from __future__ import annotations

from functools import cache
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from relax_tq_rdma.errors import StartError

if TYPE_CHECKING:
    from PIL.Image import Image

PHOTOGRAPHS: tuple[str, ...] = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
    "retina.jpg",
    "rocket.jpg",
)
"""Colour photographs of the wheel, 9 files from 451x300 to 1411x1411 pixels."""

VISION_EXTRA = "pip install 'relax-tq-rdma[vision]'"


def require_vision_extra() -> None:
    """Check for the libraries of the ``vision`` extra without importing them.

    Raises:
        StartError: one is missing; the message names it and the extra.
    """
    needed = {"PIL": "Pillow", "skimage": "scikit-image", "transformers": "transformers"}
    missing = [name for module, name in needed.items() if util.find_spec(module) is None]
    if missing:
        raise StartError(f"the demo needs {' and '.join(missing)}, which the vision extra brings: {VISION_EXTRA}")


@cache
def photograph(name: str) -> Image:
    """One photograph as an RGB PIL image, cached in this process.

    Raises:
        StartError: the installed scikit-image does not hold the file.
    """
    from PIL import Image as images

    path = _data_folder() / name
    try:
        with images.open(path) as opened:
            picture: Image = opened.convert("RGB")
        return picture
    except OSError as exc:
        raise StartError(
            f"photograph {name} of scikit-image cannot be read ({exc.strerror or exc}): reinstall it, {VISION_EXTRA}"
        ) from None


def _data_folder() -> Path:
    spec = util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise StartError(f"scikit-image is missing, the vision extra brings it: {VISION_EXTRA}")
    return Path(next(iter(spec.submodule_search_locations))) / "data"

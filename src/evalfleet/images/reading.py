"""Which layers are worth reading, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from .manifests import Image, Layer
from .overlay import Interest, Overlay
from .streams import Unreadable

SMALL = 64 << 20
MOST_NAMED = 6 << 30
_COPIED = re.compile(r"^(?:/bin/sh -c #\(nop\) )?\s*(?:COPY|ADD)\b")


Files: TypeAlias = Mapping[str, bytes]
"""Path below the root -> content."""
Chooser: TypeAlias = Callable[[str], Interest]


def all_files(image: Image, root: str, interest: Chooser) -> Files:
    """What is below `root`, from all layers. Raises Unreadable, OSError."""
    return _files(image.layers, root, interest)


def likely_files(image: Image, root: str, interest: Chooser, enough: Callable[[Files], bool]) -> Files:
    """The same of an image whose layers are far away: those that can hold it, as the image's history tells.

    Copies into the folder, and small layers that speak of it; if that is not enough, all that speak of it and
    all small ones. Raises Unreadable if there is nothing that may be read, OSError.
    """
    top = re.compile(rf"(?<![\w.-])/{re.escape(root.split('/')[0])}(?![\w.-])")
    named = [layer for layer in image.layers if top.search(layer.made_by)]
    first = [layer for layer in named if _COPIED.match(layer.made_by) or layer.size <= SMALL]
    more = [layer for layer in image.layers if layer in named or layer.size <= SMALL]
    for layers in (first, more):
        if layers and sum(layer.size for layer in layers) <= MOST_NAMED:
            found = _files(layers, root, interest)
            if enough(found):
                return found
    raise Unreadable(f"no layer that may hold /{root} is small enough to look for it")


def _files(layers: Sequence[Layer], root: str, interest: Chooser) -> Files:
    overlay = Overlay(root, interest)
    for layer in layers:
        with layer.open() as stream:
            overlay.add(stream)
    return overlay.files

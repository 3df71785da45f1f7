"""The scripted agent's head: what to do next, from the instruction and the elements on the page.

Pure: no browser, no clock, no chance. A handful of rules in fixed order, each a few lines, none knows a task
by its name. It reads names and quoted words, fills fields, ticks boxes, looks behind tabs, and presses
Submit; it cannot see pictures, drag, scroll or reason, and fails what needs that. A benchmark that a script
could finish would demonstrate nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

TEXT_FIELDS = ("input_text", "input_password", "input_number", "textarea")
BOXES = ("input_checkbox", "input_radio")
SUBMITS = ("submit", "login", "ok", "search")
WIDGETS = {
    "checkbox": "input_checkbox",
    "radio": "input_radio",
    "text": "input_text",
    "textarea": "textarea",
    "button": "button",
}
ORDINALS = {
    "1st": 0,
    "2nd": 1,
    "3rd": 2,
    "4th": 3,
    "5th": 4,
    "6th": 5,
    "7th": 6,
    "8th": 7,
    "9th": 8,
    "10th": 9,
}


@dataclass(frozen=True)
class Element:
    """One visible element, or one line of text (tag `t`), with its centre in page pixels."""

    ref: int
    tag: str
    text: str
    ident: str
    classes: str
    x: float
    y: float
    value: str | bool | None
    parent: int

    @property
    def key(self) -> str:
        """Names the same thing on the next look too: the benchmark numbers lines of text anew each time."""
        return str(self.ref) if self.ref > 0 else f"{self.text}@{self.x:.0f},{self.y:.0f}"


@dataclass(frozen=True)
class Click:
    """Press the mouse on this element."""

    target: Element
    why: str


@dataclass(frozen=True)
class Type:
    """Click into this field and replace what it holds by the text."""

    target: Element
    text: str


Action = Click | Type


@dataclass(frozen=True)
class View:
    """The instruction, the elements in the page's order, and the keys of what was acted on before."""

    instruction: str
    elements: Sequence[Element]
    done: frozenset[str] = field(default=frozenset())

    def fresh(self, tags: Iterable[str]) -> list[Element]:
        """The elements with these tags that were not acted on yet."""
        wanted = tuple(tags)
        return [e for e in self.elements if e.tag in wanted and e.key not in self.done]


def elements_of(node: dict[str, Any], parent: int = 0) -> list[Element]:
    """The benchmark's own description of the page (`core.getDOMInfo()`), flattened in its order."""
    classes = node.get("classes")
    here = Element(
        ref=node["ref"],
        tag=node["tag"].lower(),
        text=str(node.get("text") or "").strip(),
        ident=node.get("id") or "",
        classes=classes if isinstance(classes, str) else "",
        x=node["left"] + node["width"] / 2,
        y=node["top"] + node["height"] / 2,
        value=node.get("value"),
        parent=parent,
    )
    found = [here]
    for child in node["children"]:
        found += elements_of(child, here.ref)
    return found


def quoted(instruction: str) -> list[str]:
    """The words in double quotes, in order."""
    return re.findall(r'"([^"]+)"', instruction)


def names(instruction: str) -> list[str]:
    """What the instruction calls by name, in order: quoted words, or the ones after a few usual phrases."""
    if chosen := re.match(
        r"Select (.+?)(?: from the \S+| from the scroll list)? and click Submit", instruction
    ):
        return [name for name in chosen[1].split(", ") if name != "nothing"]
    if menu := re.match(r"Select (\S+>\S+)", instruction):
        return menu[1].split(">")
    if listed := re.search(r"item: (.+)$", instruction):
        return listed[1].split(", ")
    plain = re.findall(
        r"[Cc]lick button (\w+)|(Tab #\d+)|(\(-?\d+,-?\d+\))|[Cc]lick the (\w+) button", instruction
    )
    return quoted(instruction) or ["".join(groups) for groups in plain]


def decide(view: View) -> Action | None:
    """The next action by the first rule that has one; nothing when the agent is at its wits' end."""
    for rule in RULES:
        if action := rule(view):
            return action
    return None


def fill(view: View) -> Action | None:
    """Fill the text fields, in their order, with the values that the instruction gives or points at."""
    if not re.search(r"\b(enter|type|copy|solve)\b", view.instruction, re.IGNORECASE):
        return None
    fields = [e for e in view.elements if e.tag in TEXT_FIELDS and not e.value]
    values = values_for(view)
    everywhere = len(values) == 1 and "both" in view.instruction
    before = sum(1 for e in view.elements if e.tag in TEXT_FIELDS and e.key in view.done)
    left = values if everywhere else values[before:]
    for target in fields:
        if left and target.key not in view.done:
            return Type(target, left[0])
    return None


def values_for(view: View) -> list[str]:
    """The texts to be typed: quoted in the instruction, read from the page beside a label, or worked out."""
    words = [w for w in quoted(view.instruction) if w.lower() not in SUBMITS]
    if "lower case" in view.instruction:
        words = [w.lower() for w in words]
    if "upper case" in view.instruction:
        words = [w.upper() for w in words]
    texts = [e for e in view.elements if e.text]
    if asked := re.search(r"value of (.+?) into", view.instruction):
        words = [after.text for label, after in pairwise(texts) if label.text == asked[1]][:1]
    if view.instruction.startswith("Copy"):
        words = [str(e.value) for e in view.elements if e.tag == "textarea"][:1]
    if place := re.search(r"the (\w+) word in the", view.instruction):
        words = [nth_word(e.text, place[1]) for e in texts if e.tag in ("p", "textarea")][:1]
    for e in texts:
        if e.ident == "math-problem" and (sum_ := re.fullmatch(r"(\d+) ([+-]) (\d+) =", e.text)):
            words = [str(int(sum_[1]) + int(sum_[2] + sum_[3]))]
    return words


def nth_word(text: str, place: str) -> str:
    """The word of a text at `2nd` or `last`, bare of punctuation."""
    found = text.split()
    index = -1 if place == "last" else min(ORDINALS.get(place, 0), len(found) - 1)
    return found[index].strip(".,") if found else ""


def tick(view: View) -> Action | None:
    """Tick the next box whose label is asked for."""
    wanted = names(view.instruction)
    for box in view.fresh(BOXES):
        label = " ".join(e.text for e in view.elements if e.tag == "t" and e.parent == box.parent)
        if label in wanted and not box.value:
            return Click(box, f"the box {label}")
    return None


def press_named(view: View) -> Action | None:
    """Click what is called by name, in the instruction's order; a name typed into a field counts as done."""
    typed = {e.value for e in view.elements if e.tag in TEXT_FIELDS and e.value}
    boxed = {
        e.parent for e in view.elements if e.tag in BOXES
    }  # a click on a box's label would untick it again
    for name in names(view.instruction):
        same = [e for e in view.elements if name in (e.text, e.ident)]
        same = same or [e for e in view.elements if name.lower() == e.text.lower()]
        if name in typed or any(e.key in view.done for e in same):
            continue
        if name == "x":
            same = [e for e in view.elements if "titlebar-close" in e.classes]
        for e in same:
            if e.tag not in TEXT_FIELDS and e.parent not in boxed:
                return Click(e, name)
    return None


def press_icon(view: View) -> Action | None:
    """Click the icon of that name nearest to a person's name; open the person's entry when there is none."""
    asked = re.search(
        r"by (\w+) and click the (\w+) icon|user (@\w+), click on the \"(\w+)\"", view.instruction
    )
    if not asked:
        return None
    person, icon = (asked[1], asked[2]) if asked[1] else (asked[3], asked[4].lower())
    entries = [e for e in view.elements if e.text == person]
    icons = [e for e in view.fresh(("span", "div", "a", "button")) if icon in e.classes.split()]
    if icons and entries:
        return Click(min(icons, key=lambda e: abs(e.y - entries[0].y)), f"the {icon} of {person}")
    if icons:
        return Click(icons[0], icon)
    return next((Click(e, person) for e in entries if e.key not in view.done), None)


def press_kind(view: View) -> Action | None:
    """Click a thing by its kind: `a "checkbox" widget`, `the 2nd input textbox`, `the button`."""
    if (kind := re.search(r'"(\w+)" widget', view.instruction)) and kind[1] in WIDGETS:
        return next((Click(e, kind[1]) for e in view.fresh((WIDGETS[kind[1]],))), None)
    if "Focus into" in view.instruction:
        place = next((n for word, n in ORDINALS.items() if word in view.instruction), 0)
        return next((Click(e, "the field") for e in view.fresh(TEXT_FIELDS)[place : place + 1]), None)
    if view.instruction.startswith("Click the button."):
        return next((Click(e, e.text) for e in view.fresh(("button",))), None)
    return None


def look_behind(view: View) -> Action | None:
    """Open the next tab, section or folder, when the instruction speaks of such."""
    if not re.search(r"tabs|sections? below|tree", view.instruction):
        return None
    for e in view.elements:
        covers = e.tag == "h3" or "ui-tabs-anchor" in e.classes or "folder" in e.classes
        if covers and e.key not in view.done:
            return Click(e, f"to look behind {e.text or e.ident}")
    return None


def press_submit(view: View) -> Action | None:
    """Press the button that ends a form, once, if the instruction asks for it."""
    if not re.search(r"submit|login|search", view.instruction, re.IGNORECASE):
        return None
    return next((Click(e, e.text) for e in view.fresh(("button",)) if e.text.lower() in SUBMITS), None)


RULES: tuple[Callable[[View], Action | None], ...] = (
    fill,
    tick,
    press_icon,
    press_kind,
    press_named,
    look_behind,
    press_submit,
)

"""Whether the texts of an ALFWorld episode say that its task is done. For imagined episodes, where there is no game to ask.

A rule over the task's sentence (the twelve forms of the six task types) and the environment's own phrases: "You pick up the",
"You move the ... to the", "You clean/heat/cool the ... using the", "You turn on the". Pure.

Limits
* It believes what it reads: a world model that writes "You move the mug 1 to the desk 1." while the agent holds no mug has
  moved it. What that costs shows on the anchors.
* What lay at the target from the beginning counts only for tasks with two objects, and only once it was seen there.
* Paraphrases of the phrases are not understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TWO = r"(?:put two|find two) (?P<obj>\w+) (?:and put them )?(?:in|on) (?P<target>\w+)"
_TREATED = r"put an? (?P<state>clean|hot|cool) (?P<obj>\w+) (?:in|on) (?P<target>\w+)"
_TREAT = r"(?P<state>clean|heat|cool) some (?P<obj>\w+) and put it (?:in|on) (?P<target>\w+)"
_LAMP = r"(?:examine|look at) (?:the )?(?P<obj>\w+) (?:with|under) the (?P<target>\w+)"
_PLACE = r"put (?:an?|some) (?P<obj>\w+) (?:in|on) (?P<target>\w+)"
_FORMS = [(re.compile(form + r"\.?$"), kind) for form, kind in (
    (_TWO, "two"), (_TREATED, "place"), (_TREAT, "place"), (_LAMP, "lamp"), (_PLACE, "place"),
)]  # fmt: skip
_PICKED = re.compile(r"You pick up the (\w+ \d+)")
_MOVED = re.compile(r"You move the (\w+ \d+) to the (\w+ \d+)")
_TREATS = re.compile(r"You (clean|heat|cool) the (\w+ \d+) using")
_SWITCHED = re.compile(r"You turn (on|off) the (\w+ \d+)")
_CONTENTS = re.compile(r"(?:On the (\w+ \d+)|The (\w+ \d+) is open\. In it), you see ([^.]*)")
_STATE = {"clean": "clean", "heat": "hot", "cool": "cool"}
_OPPOSITE = {"hot": "cool", "cool": "hot"}


@dataclass(frozen=True)
class Goal:
    kind: str  # "place", "two" or "lamp"
    obj: str  # kind of the object
    target: str  # kind of the receptacle, or of the lamp
    state: str = ""  # "clean", "hot", "cool", or any


def goal_of(task: str) -> Goal | None:
    """The goal of a task's sentence; None for a sentence of another form."""
    for form, kind in _FORMS:
        found = form.match(task.strip().lower())
        if found:
            state = found.groupdict().get("state") or ""
            return Goal(kind, found["obj"], found["target"], _STATE.get(state, state))
    return None


def reached(goal: Goal, texts: Iterable[str]) -> bool:
    """Do these texts, in the order in which they came, end with the goal reached?"""
    held: set[str] = set()
    places: dict[str, str] = {}  # of objects that were moved
    seen: dict[str, str] = {}  # of objects that were seen somewhere
    states: dict[str, set[str]] = {}
    lamps: set[str] = set()
    for text in texts:
        for on, inside, listed in _CONTENTS.findall(text):
            seen |= dict.fromkeys(re.findall(r"\w+ \d+", listed), on or inside)
        for obj in _PICKED.findall(text):
            held.add(obj)
            places.pop(obj, None), seen.pop(obj, None)
        for verb, obj in _TREATS.findall(text):
            state = _STATE[verb]
            states[obj] = (states.get(obj, set()) | {state}) - {_OPPOSITE.get(state, "")}
        for obj, place in _MOVED.findall(text):
            held.discard(obj)
            places[obj] = place
        for switch, lamp in _SWITCHED.findall(text):
            (lamps.add if switch == "on" else lamps.discard)(lamp)

    def is_a(name: str, kind: str) -> bool:
        # sinks of games made here: ALFWorld's naming adds "basin" to a kind that has it
        return name.rpartition(" ")[0].replace("basinbasin", "basin") == kind

    if goal.kind == "lamp":
        return any(is_a(o, goal.obj) for o in held) and any(is_a(lamp, goal.target) for lamp in lamps)
    done = {
        obj: place for obj, place in places.items()
        if is_a(obj, goal.obj) and is_a(place, goal.target) and (not goal.state or goal.state in states.get(obj, ()))
    }  # fmt: skip
    if goal.kind == "place":
        return bool(done)
    there = {obj: place for obj, place in seen.items() if is_a(obj, goal.obj)} | done
    return any(sum(p == place for p in there.values()) >= 2 for place in done.values())

"""What a reader of a prompt can know of the next ALFWorld state: a memory of the texts that it shows. Pure.

Most triplets of an agent that explores cannot be predicted by anybody: what lies in a place is unknown until it is seen.
Accuracy on them measures luck, so evaluations count apart what the prompt determines:

    "action"   the command alone says it ("take mug 1 from desk 1": "You pick up the mug 1 from the desk 1.")
    "history"  the command and what was seen before: a place that is come back to, an inventory
    None       not determined by the prompt (or this memory does not know how)

Limits: commands are taken as admissible (`collect` marks the others). As the games of alfworld 0.4.2 do it, what was moved
to a place is listed first there, and every "use" of a lamp turns it on. What is moved back has its old place in the list:
not followed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from text_agents.rwml.triplets import Triplet

_THING = r"(\w+ \d+)"
_ON = re.compile(rf"On the {_THING}, you see ([^.]*)\.")
_IN = re.compile(rf"The {_THING} is open\. In it, you see ([^.]*)\.")
_SHUT = re.compile(rf"(?:The {_THING} is closed\.|You close the {_THING}\.)")
_TAKEN = re.compile(rf"You pick up the {_THING} from the {_THING}\.")
_MOVED = re.compile(rf"You move the {_THING} to the {_THING}\.")
_TREATED = re.compile(rf"(clean|heat|cool) {_THING} with {_THING}$")
_CARRIED = re.compile(rf"You are carrying: an? {_THING}\.")
_EMPTY_HANDS = "You are not carrying anything."


@dataclass
class Memory:
    """What some texts of a game say of its present state."""

    items: dict[str, list[str]] = field(default_factory=dict)  # of places whose content is known, in order
    shut: dict[str, bool] = field(default_factory=dict)  # of places with a door
    held: str | None = None  # what the agent carries; "": nothing; None: not known

    def read(self, text: str) -> None:
        """Take in one observation; later ones overrule earlier ones."""
        for pattern, door in ((_ON, False), (_IN, True)):
            for place, seen in pattern.findall(text):
                self.items[place] = _listed(seen)
                if door:
                    self.shut[place] = False
        for places in _SHUT.findall(text):
            self.shut["".join(places)] = True
        for item, place in _TAKEN.findall(text):
            self.held = item
            if item in self.items.get(place, ()):
                self.items[place].remove(item)
        for item, place in _MOVED.findall(text):
            self.held = ""
            if place in self.items:
                self.items[place].insert(0, item)
        for item in _CARRIED.findall(text):
            self.held = item
        if _EMPTY_HANDS in text:
            self.held = ""

    def after(self, command: str) -> tuple[str | None, str | None]:
        """(the next state in the game's words, "action" or "history" for what determines it); (None, None) if unknown."""
        verb, _, rest = command.partition(" ")
        if verb == "take" and " from " in rest:
            return f"You pick up the {rest.replace(' from ', ' from the ')}.", "action"
        if verb == "move" and " to " in rest:
            return f"You move the {rest.replace(' to ', ' to the ')}.", "action"
        if verb == "close":
            return f"You close the {rest}.", "action"
        if found := _TREATED.match(command):
            return f"You {found[1]} the {found[2]} using the {found[3]}.", "action"
        if verb == "use":
            return f"You turn on the {rest}.", "action"
        text = None
        if verb == "inventory" and self.held is not None:
            text = f"You are carrying: a {self.held}." if self.held else _EMPTY_HANDS
        elif command.startswith("go to "):
            text = self._arrive(command.removeprefix("go to "))
        elif verb == "open" and rest in self.items:
            text = f"You open the {rest}. {self._inside(rest)}"
        elif verb == "examine":
            text = self._content(rest)
        return (text, "history") if text else (None, None)

    def _arrive(self, place: str) -> str | None:
        content = self._content(place)
        return None if content is None else f"You arrive at {place}. {content}"

    def _content(self, place: str) -> str | None:
        if self.shut.get(place):
            return f"The {place} is closed."
        if place not in self.items:
            return None
        return self._inside(place) if place in self.shut else f"On the {place}, you see {_listing(self.items[place])}."

    def _inside(self, place: str) -> str:
        return f"The {place} is open. In it, you see {_listing(self.items[place])}."


def foretell(triplet: Triplet, turns: Sequence[tuple[str, str]] | None = None) -> tuple[str | None, str | None]:
    """(next state, what determines it) by a memory of the turns that a prompt shows (default: all) and the observation."""
    if triplet.kind != "alfworld":
        return None, None
    memory = Memory()
    for _, seen in triplet.turns if turns is None else turns:
        memory.read(seen)
    memory.read(triplet.observation)
    return memory.after(triplet.action)


def shares(triplets: Sequence[Triplet], turns: int | None = None) -> dict[str, float]:
    """Shares of N triplets by what determines their next state, for prompts of the latest `turns` (None: of all).

    foretold_exactly: of those that are determined, the share that `foretell` gets word for word.
    """
    found = [foretell(t, t.turns if turns is None else t.turns[max(0, len(t.turns) - turns) :]) for t in triplets]
    result = {name or "not": sum(kind == name for _, kind in found) / len(found) for name in ("action", "history", None)}
    exact = [text == t.next_state for (text, _), t in zip(found, triplets, strict=True) if text is not None]
    return result | {"foretold_exactly": sum(exact) / len(exact) if exact else float("nan")}


def _listed(seen: str) -> list[str]:
    return re.findall(_THING, seen)


def _listing(items: Sequence[str]) -> str:
    """ "a mug 1, a pen 2, and a cup 1" as the game writes it."""
    if not items:
        return "nothing"
    words = [f"a {item}" for item in items]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + ", and " + words[-1]

"""Games of our own in ALFWorld's domain: rooms from small tables, PDDL problems from rooms, walkthroughs that win.

For the quick start, tests and CI, where the official games are not at hand. Domain and grammar are the ones that the
alfworld package ships; the files load in stock ALFWorld too. Everything follows from the seed.

Non-obvious behaviour
* Scenes are numbered from 900, which AI2-THOR does not use, so that no game passes for an official one.
* `train` and `valid_seen` share scenes, `valid_unseen` has its own, as in the official splits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from text_agents.alfworld import shipped_grammar
from text_agents.alfworld_games import FILE_NAME, Machine
from text_agents.config import GamesConfig
from vla_wmrl.errors import require

FIRST_SCENE = 900
SCENES = {"train": (0, 8), "valid_seen": (0, 8), "valid_unseen": (8, 12)}  # numbers above FIRST_SCENE, end excluded

# room -> (receptacle, how many); openable ones start closed
ROOMS: dict[str, tuple[tuple[str, int], ...]] = {
    "kitchen": (
        ("CounterTop", 2), ("DiningTable", 1), ("Cabinet", 4), ("Drawer", 3), ("Fridge", 1), ("Microwave", 1),
        ("SinkBasin", 1), ("GarbageCan", 1),
    ),
    "bedroom": (("Bed", 1), ("Desk", 2), ("Drawer", 4), ("Shelf", 3), ("Safe", 1), ("GarbageCan", 1)),
    "living room": (("Sofa", 1), ("CoffeeTable", 1), ("SideTable", 2), ("Drawer", 3), ("Shelf", 2), ("ArmChair", 1)),
    "bathroom": (("CounterTop", 1), ("SinkBasin", 2), ("Cabinet", 3), ("Toilet", 1), ("Shelf", 1), ("GarbageCan", 1)),
}  # fmt: skip
OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave", "Safe")
FOOD_PLACES = ("CounterTop", "DiningTable", "Fridge", "Microwave", "SinkBasin", "GarbageCan")
DISH_PLACES = ("CounterTop", "DiningTable", "Cabinet", "Fridge", "Microwave", "SinkBasin")
# object -> (what can be done to it, rooms it is found in, what it fits in)
OBJECTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "Apple": ("clean heat cool", ("kitchen",), FOOD_PLACES),
    "Potato": ("clean heat cool", ("kitchen",), FOOD_PLACES),
    "Mug": ("clean heat cool", ("kitchen",), DISH_PLACES),
    "Plate": ("clean heat cool", ("kitchen",), DISH_PLACES),
    "Spoon": ("clean", ("kitchen",), ("CounterTop", "DiningTable", "Drawer", "SinkBasin")),
    "SaltShaker": ("", ("kitchen",), ("CounterTop", "DiningTable", "Cabinet", "Drawer")),
    "Pen": ("", ("bedroom", "living room"), ("Desk", "Drawer", "Shelf", "SideTable", "CoffeeTable", "GarbageCan")),
    "Book": ("", ("bedroom", "living room"), ("Bed", "Desk", "Drawer", "Shelf", "Sofa", "SideTable", "CoffeeTable")),
    "KeyChain": ("", ("bedroom", "living room"), ("Desk", "Drawer", "Safe", "Sofa", "SideTable", "ArmChair")),
    "CD": ("", ("bedroom",), ("Desk", "Drawer", "Shelf", "Safe", "GarbageCan")),
    "Vase": ("", ("living room",), ("Shelf", "SideTable", "CoffeeTable")),
    "SoapBar": ("clean", ("bathroom",), ("CounterTop", "SinkBasin", "Cabinet", "Toilet", "GarbageCan")),
    "Cloth": ("clean", ("bathroom",), ("CounterTop", "SinkBasin", "Cabinet", "Shelf")),
    "Candle": ("", ("bathroom",), ("CounterTop", "Cabinet", "Shelf", "Toilet")),
    "DeskLamp": ("toggle", ("bedroom", "living room"), ("Desk", "Shelf", "SideTable")),
}  # fmt: skip
TREATMENT = {  # task type -> (property, place that does it, verb)
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin", "clean"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave", "heat"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge", "cool"),
}
SENTENCES = {
    "pick_and_place_simple": "put a {obj} in {target}.",
    "look_at_obj_in_light": "examine the {obj} with the {target}.",
    "pick_clean_then_place_in_recep": "put a clean {obj} in {target}.",
    "pick_heat_then_place_in_recep": "put a hot {obj} in {target}.",
    "pick_cool_then_place_in_recep": "put a cool {obj} in {target}.",
    "pick_two_obj_and_place": "put two {obj} in {target}.",
}


@dataclass(frozen=True)
class Scene:
    """A room: places with a location each, and where every object lies."""

    room: str
    receptacles: dict[str, str]  # id -> kind
    objects: dict[str, tuple[str, str]]  # id -> (kind, id of the receptacle it is in)


def _id(kind: str, rng: np.random.Generator) -> str:
    """An id as ALFRED writes them: kind and a position."""
    parts = [f"{'minus' if x < 0 else 'plus'}_{abs(x):05.2f}".replace(".", "_dot_") for x in rng.uniform(-9, 9, 3)]
    return f"{kind}_bar__" + "_bar__".join(parts)


def make_scene(number: int, arrangement: int) -> Scene:
    """The room of a scene with its objects laid out; `arrangement` moves objects only."""
    fixed, loose = np.random.default_rng([FIRST_SCENE, number]), np.random.default_rng([number, arrangement])
    room = list(ROOMS)[number % len(ROOMS)]
    receptacles = {_id(kind, fixed): kind for kind, count in ROOMS[room] for _ in range(count)}
    objects = {}
    for kind in (k for k, (_, rooms, _) in OBJECTS.items() if room in rooms):
        places = [i for i, k in receptacles.items() if k in OBJECTS[kind][2]]
        for _ in range(1 if kind == "DeskLamp" else int(loose.integers(1, 4))):
            objects[_id(kind, loose)] = (kind, places[loose.integers(len(places))])
    return Scene(room, receptacles, objects)


def possible_tasks(scene: Scene) -> list[tuple[str, str, str]]:
    """(task type, object, target) of every task of the scene that is not done already; to look at it: under a lamp."""
    kinds = {kind for kind, _ in scene.objects.values()} - {"DeskLamp"}
    places = set(scene.receptacles.values())
    found = []
    for obj in sorted(kinds):
        at = [scene.receptacles[place] for kind, place in scene.objects.values() if kind == obj]
        if any(kind == "DeskLamp" for kind, _ in scene.objects.values()):
            found.append(("look_at_obj_in_light", obj, "DeskLamp"))
        for target in sorted(places & set(OBJECTS[obj][2])):
            away = sum(kind != target for kind in at)
            if away == len(at):
                found.append(("pick_and_place_simple", obj, target))
            if away == len(at) and away >= 2:
                found.append(("pick_two_obj_and_place", obj, target))
            for task_type, (prop, place, _) in TREATMENT.items():
                if prop in OBJECTS[obj][0].split() and place in places and place != target:
                    found.append((task_type, obj, target))
    return found


def problem_pddl(scene: Scene, name: str, task: tuple[str, str, str]) -> str:
    """The PDDL problem of a task in a scene; the agent starts away from every receptacle."""
    spots = {place: f"loc_bar_{i}_bar_0_bar_0_bar_0" for i, place in enumerate(scene.receptacles, start=1)}
    otypes, rtypes = sorted(OBJECTS), sorted({kind for rooms in ROOMS.values() for kind, _ in rooms})
    declared = ["agent1 - agent", "loc_bar_0_bar_0_bar_0_bar_0 - location"]
    declared += [f"{o}Type - otype" for o in otypes] + [f"{r}Type - rtype" for r in rtypes]
    declared += [f"{i} - object" for i in scene.objects] + [f"{i} - receptacle" for i in scene.receptacles]
    declared += [f"{spot} - location" for spot in spots.values()]
    facts = ["atLocation agent1 loc_bar_0_bar_0_bar_0_bar_0"]
    facts += [f"canContain {r}Type {o}Type" for o in otypes for r in OBJECTS[o][2]]
    for place, kind in scene.receptacles.items():
        facts += [f"receptacleType {place} {kind}Type", f"receptacleAtLocation {place} {spots[place]}"]
        facts += [f"openable {place}"] if kind in OPENABLE else []
    for i, (kind, place) in scene.objects.items():
        facts += [f"objectType {i} {kind}Type", f"inReceptacle {i} {place}", f"objectAtLocation {i} {spots[place]}"]
        properties = [*(f"{p}able" for p in OBJECTS[kind][0].split())]
        properties += [] if kind == "DeskLamp" else ["pickupable"]
        facts += [f"{p} {i}" for p in properties]
    lines = ["(define", f"(problem {name})", "(:domain alfred)", "(:objects", *declared, ")", "(:init"]
    return "\n".join([*lines, *(f"({fact})" for fact in facts), ")", f"(:goal {goal_pddl(*task)})", ")"])


def goal_pddl(task_type: str, obj: str, target: str) -> str:
    """The goal of a task, as ALFWorld's six task types define it."""
    if task_type == "look_at_obj_in_light":
        return (
            f"(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot {target}Type) "
            "(toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {obj}Type) (holds ?a ?o))))"
        )
    inside = f"(objectType {{0}} {obj}Type) (receptacleType ?r {target}Type) (inReceptacle {{0}} ?r)"
    if task_type == "pick_two_obj_and_place":
        return (
            f"(and (exists (?r - receptacle) (exists (?o1 - object) (and {inside.format('?o1')} "
            f"(exists (?o2 - object) (and (not (= ?o1 ?o2)) {inside.format('?o2')}))))))"
        )
    extra = {"clean": "(isClean ?o)", "heat": "(isHot ?o)", "cool": "(isCool ?o)", "": ""}
    done = extra[TREATMENT[task_type][0] if task_type in TREATMENT else ""]
    return f"(and (exists (?r - receptacle) (exists (?o - object) (and {inside.format('?o')} {done}))))"


def walkthrough(scene: Scene, task: tuple[str, str, str], names: dict[str, str]) -> list[str]:
    """Commands that do the task; names: readable name of each id, in lower case as the translator writes ids."""
    task_type, obj, target = task
    plan: list[str] = []
    visited: list[str] = []

    def called(i: str) -> str:
        return names[i.lower()]

    def visit(place: str, open_it: bool = True) -> None:
        if not visited or visited[-1] != place:  # going where one already is is not admissible
            plan.append(f"go to {called(place)}")
        if open_it and scene.receptacles[place] in OPENABLE and f"open {called(place)}" not in plan:
            plan.append(f"open {called(place)}")
        visited.append(place)

    def first(kind: str) -> str:
        return next(place for place, k in scene.receptacles.items() if k == kind)

    found = [(i, place) for i, (kind, place) in scene.objects.items() if kind == obj]
    for i, place in found[: 2 if task_type == "pick_two_obj_and_place" else 1]:
        visit(place)
        plan.append(f"take {called(i)} from {called(place)}")
        if task_type == "look_at_obj_in_light":
            lamp, at = next((i, place) for i, (kind, place) in scene.objects.items() if kind == target)
            visit(at)
            return [*plan, f"use {called(lamp)}"]
        if task_type in TREATMENT:
            _, kind, verb = TREATMENT[task_type]
            visit(first(kind), open_it=False)
            plan.append(f"{verb} {called(i)} with {called(first(kind))}")
        visit(first(target))
        plan.append(f"move {called(i)} to {called(first(target))}")
    return plan


def make_game(scene_number: int, trial: int, task: tuple[str, str, str] | None = None) -> tuple[str, dict, dict]:
    """(folder name, game, traj_data) of one game. `task`: of `possible_tasks`; None: drawn from (scene, trial).

    Raises UserError where the walkthrough does not win, which would be a fault of the tables above.
    """
    scene = make_scene(scene_number, trial)
    options = possible_tasks(scene)
    if task is None:
        rng = np.random.default_rng([scene_number, trial, 1])
        kinds = sorted({kind for kind, _, _ in options})  # by type first: placing has many more options than the others
        kind = kinds[rng.integers(len(kinds))]
        chosen = [option for option in options if option[0] == kind]
        task = chosen[rng.integers(len(chosen))]
    domain, grammar = shipped_grammar()
    sentence = SENTENCES[task[0]].format(obj=task[1].lower(), target=task[2].lower())
    data = {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL.", sentence),
        "pddl_problem": problem_pddl(scene, f"plan_scene{FIRST_SCENE + scene_number}_{trial}", task),
        "solvable": True,
    }
    machine = Machine(data)
    names = {i: entity.name for i, entity in machine.entities.items()}
    data["walkthrough"] = walkthrough(scene, task, names)
    state, _ = machine.start()
    for command in data["walkthrough"]:
        require(command in state.commands, f"scene {scene_number}, trial {trial}: {command!r} is not admissible")
        state, _ = machine.step(state, command)
    require(machine.sas.reached(state.values), f"scene {scene_number}, trial {trial}: the walkthrough does not win")
    looks = task[0] == "look_at_obj_in_light"
    params = {
        "object_target": task[1], "parent_target": "" if looks else task[2], "mrecep_target": "",
        "toggle_target": task[2] if looks else "", "object_sliced": False,
    }  # fmt: skip
    number = FIRST_SCENE + scene_number
    traj = {"task_id": f"trial_{trial:05d}", "task_type": task[0], "pddl_params": params}
    traj |= {"scene": {"floor_plan": f"Own{number}", "scene_num": number}}
    return f"{task[0]}-{task[1]}-None-{task[2]}-{number}", data, traj


def write_games(folder: str | Path, n: dict[str, int], seed: int = 0) -> dict[str, int]:
    """Write n[split] games below `folder`; returns how many. Same seed, same files.

    Raises UserError for an unknown split, and where `folder` already holds games.
    """
    folder = Path(folder)
    written = {}
    for split, count in n.items():
        require(split in SCENES, f"no games of our own for split {split!r} (known: {', '.join(SCENES)})")
        require(not any((folder / split).glob(f"*/*/{FILE_NAME}")), f"{folder / split} holds games: name another folder")
        first, end = SCENES[split]
        for i in range(count):
            scene = first + i % (end - first)
            trial = seed * 10_000 + i + (5_000 if split == "valid_seen" else 0)  # other arrangements of the same rooms
            name, data, traj = make_game(scene, trial)
            place = folder / split / name / traj["task_id"]
            place.mkdir(parents=True, exist_ok=True)
            (place / FILE_NAME).write_text(json.dumps(data), encoding="utf-8")
            (place / "traj_data.json").write_text(json.dumps(traj, indent=1), encoding="utf-8")
        written[split] = count
    return written


def main(cfg: GamesConfig) -> None:
    """`vla-wmrl text games`."""
    counts = {"train": cfg.train, "valid_seen": cfg.valid_seen, "valid_unseen": cfg.valid_unseen}
    written = write_games(cfg.output_dir, {split: n for split, n in counts.items() if n}, cfg.seed)
    print("\n".join(f"{split}: {n} games, each won by its walkthrough" for split, n in written.items()))
    print(f"use them with --data={cfg.output_dir}, or export ALFWORLD_DATA={cfg.output_dir}")

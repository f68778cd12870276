"""Stage progress: on made-up states, and along an expert's episode."""

from dataclasses import replace

import numpy as np
import pytest

from sim.expert import Expert
from sim.progress import held, progress
from sim.view import Pose, Region, View

EYE, UPRIGHT = np.eye(3), np.array([0.0, 0.0, 0.0, 1.0])


def pose(x, y, z):
    return Pose(np.array([x, y, z], dtype=float), UPRIGHT, EYE)


def box_task(eef=(0, 0, 0.3), width=0.08, butter=(0.2, 0.0, 0.01), cheese=(0.2, 0.2, 0.01), satisfied=(False, False)):
    """Two boxes on a table at 0, a basket whose inside is at (-0.2, 0)."""
    return View(
        eef_pos=np.array(eef, dtype=float), eef_quat=UPRIGHT, eef_mat=EYE,
        gripper_qpos=np.array([width / 2, -width / 2]), gripper_qvel=np.zeros(2),
        objects={"butter_1": pose(*butter), "cream_cheese_1": pose(*cheese), "basket_1": pose(-0.2, 0, 0)},
        regions={"inside": Region(np.array([-0.2, 0.0, 0.07]), EYE, np.array([0.06, 0.06, 0.07]))},
        joints={}, goal=(("in", "butter_1", "inside"), ("in", "cream_cheese_1", "inside")), satisfied=satisfied,
    )  # fmt: skip


def door_task(joint, eef=(0, 0, 0.5), satisfied=(False,)):
    return replace(box_task(eef), objects={"microwave_1": pose(0, 0.4, 0)}, joints={"microwave_1_microjoint": joint},
                   goal=(("close", "microwave_1"),), satisfied=satisfied)  # fmt: skip


def test_progress_is_one_exactly_when_all_conjuncts_hold():
    assert progress(box_task(satisfied=(True, True))) == 1.0
    best = box_task(eef=(-0.2, 0, 0.2), width=0.04, butter=(-0.2, 0, 0.2), satisfied=(False, True))
    assert 0.9 < progress(best) < 1.0
    assert progress(door_task(0.0, eef=(0, 0.4, 0))) < 1.0  # closed by the joint, but the simulator does not agree


def test_conjuncts_count_equally():
    one = progress(box_task(eef=(0, 0, 5), satisfied=(True, False)))
    assert one == pytest.approx(0.5, abs=1e-6)
    assert one == pytest.approx(progress(box_task(eef=(0, 0, 5), satisfied=(False, True))))


def test_stages_of_a_pick_and_place_rise_in_order():
    stages = [
        box_task(),
        box_task(eef=(0.2, 0, 0.05)),  # near
        box_task(eef=(0.2, 0, 0.01)),  # around it, open
        box_task(eef=(0.2, 0, 0.01), width=0.04),  # grasped
        box_task(eef=(0.2, 0, 0.06), width=0.04, butter=(0.2, 0, 0.06)),  # half lifted
        box_task(eef=(0.2, 0, 0.12), width=0.04, butter=(0.2, 0, 0.12)),  # lifted
        box_task(eef=(0, 0, 0.2), width=0.04, butter=(0, 0, 0.2)),  # carried half way
        box_task(eef=(-0.2, 0, 0.2), width=0.04, butter=(-0.2, 0, 0.2)),  # over the basket
        box_task(eef=(-0.2, 0, 0.05), butter=(-0.2, 0, 0.05), satisfied=(True, False)),
    ]
    values = [progress(v) for v in stages]
    assert np.all(np.diff(values) > 0), values


def test_approaching_is_monotone_in_distance():
    values = [progress(box_task(eef=(0.2 - d, 0, 0.05))) for d in np.linspace(0.5, 0.0, 30)]
    assert np.all(np.diff(values) >= 0)


def test_letting_go_over_the_target_loses_nothing():
    held_over = box_task(eef=(-0.2, 0, 0.2), width=0.04, butter=(-0.2, 0, 0.2))
    let_go = replace(held_over, gripper_qpos=np.array([0.04, -0.04]))
    assert progress(let_go) == progress(held_over)


def test_an_open_hand_or_an_empty_one_does_not_hold():
    around = {"eef": (0.2, 0, 0.01)}
    assert held(box_task(**around, width=0.04), "butter_1")
    assert not held(box_task(**around, width=0.078), "butter_1")
    assert not held(box_task(**around, width=0.001), "butter_1")
    assert not held(box_task(eef=(0.2, 0.2, 0.01), width=0.04), "butter_1")


def test_a_mug_is_held_at_its_rim_and_a_pot_at_its_knob():
    """Their origins are 8 to 11 cm from the grip site: a distance to the origin would never call them held."""
    mug = replace(box_task(eef=(0.0125, 0.045, 0.095), width=0.005), objects={"porcelain_mug_1": pose(0, 0, 0)})
    pot = replace(box_task(eef=(0, 0, 0.078), width=0.013), objects={"moka_pot_1": pose(0, 0, 0)})
    assert held(mug, "porcelain_mug_1") and held(pot, "moka_pot_1")


def test_the_hand_is_in_one_place():
    """Hovering between two objects is not worth more than being at one of them."""
    at_one = progress(box_task(eef=(0.2, 0.0, 0.01)))
    between = progress(box_task(eef=(0.2, 0.1, 0.01)))
    assert between < at_one


def test_a_joint_counts_by_its_travel():
    values = [progress(door_task(q)) for q in (-1.6, -1.0, -0.4, -0.1)]
    assert np.all(np.diff(values) > 0)
    assert values[0] < 0.05


def test_an_experts_episode_climbs(env):
    expert = Expert("libero_10", 0)
    env.reset(env.official_states[3])
    values, success = [progress(env.privileged())], False
    while not success and env.steps < 300:
        success = env.step(expert.act(env.privileged()))
        values.append(progress(env.privileged()))
    assert success and values[-1] == 1.0 and values[0] < 0.1
    assert max(values[:-1]) < 1.0
    assert np.min(values - np.maximum.accumulate(values)) > -0.3  # a done conjunct hands the reach on

"""Our LIBERO environment beside LIBERO's own on robosuite and lerobot's `LiberoEnv`, in one process, on the same actions.

    python benchmarks/sim.py --output_dir results/sim              # all tasks; --limit=1 does the next one only
    python benchmarks/sim.py --output_dir results/sim --memory     # then memory of a worker, each in its own process

Scaling over workers is benchmarks/sim_scaling.py, whole episodes benchmarks/sim_episodes.py; the tables here take their rows.

Per task: construction (ours twice: empty cache, filled cache), resets, control steps without cameras (blocks of the
contenders take turns), steps with a look every 10, and the bits: `exact` against robosuite's own `env.step` on LIBERO's own
model over 200 steps that press things down. Seconds are CPU seconds of the process, since others use the machine: read the
ratios. Tasks that the output already has are skipped. `bound` is `mj_step` alone, replaying the controls of `fast`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

# Scripts of this folder search it first, where this file hides the package of its name: to them it is that package.
__path__ = [str(Path(__file__).resolve().parents[1] / "sim")]

from sim.libero import EnvSpec, LiberoEnv
from sim.protocol import SETTLE_ACTION, SETTLE_STEPS, STATE_KEY, axis_angle
from sim.suites import libero_modules, numpy_seed, quiet
from vla_wmrl.tracking import read_jsonl, write_json

TASKS = [("libero_10", 0), ("libero_spatial", 1), ("libero_object", 0), ("libero_goal", 0), ("libero_90", 20),
         ("libero_10", 9), ("libero_spatial", 4), ("libero_object", 5), ("libero_goal", 7), ("libero_90", 46),
         ("libero_10", 3)]  # fmt: skip
MODES = ("exact", "near", "fast")
EQUAL_STEPS, IMAGE_SIZE, IMAGE_EVERY = 200, 128, 5
OBSERVED = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
IMAGES = {"agentview_image": "observation.images.image", "robot0_eye_in_hand_image": "observation.images.image2"}
BLOCK, REPEATS, LOOK_EVERY, LEROBOT_STEPS = 20, 5, 10, 10


def seconds(call):
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def pressing_actions(n: int, seed: int = 1) -> np.ndarray:
    """[n, 7]: random motion with a drift down and changing grips, so that the hand meets table and things."""
    rng = np.random.default_rng(seed)
    actions = np.clip(rng.normal(0, 0.4, (n, 7)) + np.array([0, 0, -0.6, 0, 0, 0, 0]), -1, 1)
    actions[:, 2] *= np.where(np.arange(n) % 80 < 60, 1, -1)  # down long enough to press on something, and up again
    actions[:, 6] = np.where(np.arange(n) // 20 % 2, 1, -1)
    return actions


def reference_env(bddl: str, image_size: int = 0):
    """LIBERO's ControlEnv on the model with everything in it, with robosuite's cameras where `image_size` is not 0."""
    _, _, control_env = libero_modules()
    looks = image_size > 0
    with quiet(), numpy_seed(0):
        control = control_env(bddl_file_name=bddl, use_camera_obs=looks, has_renderer=False, has_offscreen_renderer=looks,
                              camera_heights=image_size, camera_widths=image_size)  # fmt: skip
    control.env.visualize(vis_settings=dict.fromkeys(control.env._visualizations, False))  # as `reset` does
    return control


def same_reset(control, ours: LiberoEnv) -> None:
    """Gives `control` the warm start of ours.

    robosuite runs one forward more when it makes a renderer, which moves the solver's warm start by 1e-10; in a heap of
    objects the last bits then differ from robosuite's own environment without cameras, and contacts blow that up.
    """
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(control.env.sim.model._model, control.env.sim.data._data, ours._fixtures((0,)).physics, kind)


def start_reference(control, ours: LiberoEnv, state: np.ndarray) -> None:
    """LIBERO's own start of an episode, with the fixtures where `ours` has them."""
    sim = control.env.sim
    sim.model.body_pos[:], sim.model.body_quat[:] = ours.model.body_pos, ours.model.body_quat
    with quiet():
        control.env._get_observations(force_update=True)
        control.set_init_state(state)
        for _ in range(SETTLE_STEPS):
            control.step(SETTLE_ACTION)


def robot_contacts(model, data) -> int:
    bodies = model.geom_bodyid[data.contact.geom[: data.ncon]] if data.ncon else np.zeros((0, 2), int)
    names = [[model.body(b).name for b in pair] for pair in bodies]
    robot = [[n.startswith(("robot0", "gripper0")) for n in pair] for pair in names]
    return sum(a != b for a, b in robot)


def equivalence(bddl: str, ours: LiberoEnv, state: np.ndarray) -> dict:
    """Largest differences over 200 steps from the same start; the reference is stepped and drawn by robosuite.

    State and reward at every step, the observed robot state too; both cameras (4 samples a pixel) at every IMAGE_EVERY-th.
    """
    ours.reset(state)
    control = reference_env(bddl, IMAGE_SIZE)  # all of it before ours: its renderer does not bear another one's turns
    same_reset(control, ours)
    start_reference(control, ours, state)
    data, theirs = control.env.sim.data._data, []
    for action in pressing_actions(EQUAL_STEPS):
        _, reward, _, _ = control.step(action)
        seen = {name: np.array(control.env._observables[name].obs) for name in (*OBSERVED, *IMAGES)}
        theirs.append({"qpos": data.qpos.copy(), "qvel": data.qvel.copy(), "reward": float(reward), **seen})
    control.close()
    worst = dict.fromkeys(("qpos", "qvel", "state", "reward", "pixel"), 0.0)
    touching, success = 0, 0
    for i, (action, expected) in enumerate(zip(pressing_actions(EQUAL_STEPS), theirs, strict=True)):
        drawn = i % IMAGE_EVERY == IMAGE_EVERY - 1
        ours.spec = replace(ours.spec, image_size=IMAGE_SIZE if drawn else 0)
        done = ours.step(action, sample=True)
        look = ours.look()
        pos, quat, fingers = (expected[name] for name in OBSERVED)
        state_there = np.concatenate([pos, axis_angle(quat), fingers]).astype(np.float32)
        found = {
            "qpos": np.abs(ours.data.qpos - expected["qpos"]).max(),
            "qvel": np.abs(ours.data.qvel - expected["qvel"]).max(),
            "state": np.abs(look[STATE_KEY] - state_there).max(),
            "reward": abs(expected["reward"] - done),
            "pixel": max(
                (np.abs(look[key].astype(int) - expected[name][::-1, ::-1]).max() for name, key in IMAGES.items())
                if drawn
                else (0,)
            ),
        }
        worst = {name: max(worst[name], float(found[name])) for name in worst}
        touching += robot_contacts(ours.model, ours.data) > 0
        success += done
    return {"mode": "exact", "steps": EQUAL_STEPS, "images": EQUAL_STEPS // IMAGE_EVERY * len(IMAGES),
            "steps_with_robot_contact": int(touching), "steps_with_success": int(success), "max_abs_difference": worst,
            "bit_equal": not any(worst.values())}  # fmt: skip


def controls_of(env: LiberoEnv, actions: np.ndarray) -> np.ndarray:
    """[25 * steps, nu]: what the controller of `env` commands, substep by substep; `env` stays where it stands."""
    start, stepper, controls = env.snapshot(), env._stepper, []
    for action in actions:
        for substep in range(stepper.substeps):
            stepper.run(action, substep, substep + 1)
            controls.append(env.data.ctrl.copy())
    env.restore(start)
    return np.stack(controls)


def bound(env: LiberoEnv, actions: np.ndarray):
    """A call that replays the controls of `actions` through bare mj_step from where `env` stands."""
    import mujoco

    controls = controls_of(env, actions)

    def replay() -> None:
        env.model.opt.jacobian = mujoco.mjtJacobian.mjJAC_SPARSE
        for control in controls:
            env.data.ctrl[:] = control
            mujoco.mj_step(env.model, env.data)
        env.model.opt.jacobian = mujoco.mjtJacobian.mjJAC_AUTO

    return replay


def measure(suite: str, task_id: int) -> dict:
    """All of one task."""
    out: dict = {"suite": suite, "task_id": task_id, "seconds": {}}
    with tempfile.TemporaryDirectory() as empty:  # one compilation in an empty cache, which is then filled
        os.environ["VLA_WMRL_CACHE"] = empty
        envs = {mode: LiberoEnv(EnvSpec(suite, task_id, 0, mode, placements=1)) for mode in MODES}
        before = os.times().children_user + os.times().children_system
        _, first = seconds(lambda: envs["exact"].model)
        first += os.times().children_user + os.times().children_system - before
        _, second = seconds(lambda: envs["fast"].model)
        _ = envs["near"].model
        state = envs["exact"].official_states[0]
        control, theirs = seconds(lambda: reference_env(envs["exact"].task.bddl))
        out["seconds"]["construction"] = {"ours, empty cache": [first], "ours, filled cache": [second], "libero": [theirs]}
        pictures = LiberoEnv(EnvSpec(suite, task_id, IMAGE_SIZE, "exact", placements=1))
        out["equivalence"] = equivalence(pictures.task.bddl, pictures, state)
        pictures.close()
        out["seconds"]["step"] = steps(control, envs, state)
        out["seconds"]["reset"] = resets(control, envs["fast"], state)
        control.close()
        for env in envs.values():
            env.close()
        out["seconds"]["step with looks"] = looks(suite, task_id, state)
    return out


def steps(control, envs: dict, state: np.ndarray) -> dict[str, list[float]]:
    """Seconds of a step without cameras; every contender runs the same block of actions, then the next block."""
    for env in envs.values():
        env.reset(state)
        env.step(SETTLE_ACTION)  # compiles
    start_reference(control, envs["exact"], state)
    times: dict[str, list[float]] = {name: [] for name in (*MODES, "bound", "robosuite")}
    for actions in np.split(pressing_actions(BLOCK * REPEATS), REPEATS):
        replay, start = bound(envs["fast"], actions), envs["fast"].snapshot()
        times["bound"].append(seconds(replay)[1] / BLOCK)
        envs["fast"].restore(start)
        for name, env in envs.items():
            times[name].append(seconds(lambda env=env, actions=actions: [env.step(a) for a in actions])[1] / BLOCK)
        times["robosuite"].append(seconds(lambda actions=actions: [control.step(a) for a in actions])[1] / BLOCK)
    return times


def resets(control, env: LiberoEnv, state: np.ndarray) -> dict[str, list[float]]:
    """Seconds of a reset to an initial state, without the settle steps (the same physics for both)."""

    def ours() -> None:
        env.restore(env._fixtures((0,)))
        env._control.set_state(state)
        env._control.env.sim.forward()

    def theirs() -> None:
        with quiet():
            control.reset()
            control.set_init_state(state)

    ours()
    return {"ours": [seconds(ours)[1] for _ in range(5)], "libero": [seconds(theirs)[1] for _ in range(2)]}


def looks(suite: str, task_id: int, state: np.ndarray) -> dict[str, list[float]]:
    """Seconds of a step with two 256-pixel cameras: lerobot's draws at every step, ours when the policy looks."""
    from lerobot.envs.libero import LiberoEnv as Lerobot

    benchmark, _, _ = libero_modules()
    actions = pressing_actions(LEROBOT_STEPS * 2).astype(np.float32)
    times: dict[str, list[float]] = {}
    for name, spec, every in (
        ("ours", EnvSpec(suite, task_id, 256, "exact", placements=1), LOOK_EVERY),
        ("ours, every step", EnvSpec(suite, task_id, 256, "exact", placements=1), 1),
        ("ours, fast, 64 pixels, 8 mm", EnvSpec(suite, task_id, 64, "fast", 8.0, 0, placements=1), LOOK_EVERY),
    ):
        env = LiberoEnv(spec)
        env.reset(state)

        def run(env=env, every=every) -> None:
            for i, action in enumerate(actions):
                env.step(action, sample=i % every == every - 1)

        times[name] = [seconds(run)[1] / len(actions) for _ in range(3)]
        env.close()
    with quiet():
        suite_object = benchmark.get_benchmark(suite)()
        theirs = Lerobot(suite_object, task_id, suite, obs_type="pixels_agent_pos", init_states=False)
        theirs.reset(seed=0)
        half = np.split(actions, 2)
        times["lerobot"] = [seconds(lambda a=a: [theirs.step(x) for x in a])[1] / len(a) for a in half]
        theirs.close()
    return times


# ---- memory
def resident() -> dict[str, float]:
    """MB of this process: resident, of which its own (not shared with files)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {"resident_mb": int(status["VmRSS"].split()[0]) / 1024, "own_mb": int(status["RssAnon"].split()[0]) / 1024}


def remember(name: str, episodes: int) -> dict:
    """Memory of a worker with cameras: three LIBERO-Long tasks in turn, `episodes` episodes of 10 steps and a look."""
    rows = {}
    if name == "ours":
        envs = [LiberoEnv(EnvSpec("libero_10", task, 64, "fast", 8.0, 0)) for task in (0, 1, 7)]
        starts = [env.official_states for env in envs]
        for episode in range(episodes):
            env, states = envs[episode % 3], starts[episode % 3]
            env.reset(states[episode % len(states)], key=(episode,))
            for i, action in enumerate(pressing_actions(10, episode)):
                env.step(action, sample=i == 9)
            env.look()
            if episode + 1 in (3, 6, episodes):
                rows[episode + 1] = resident()
    else:
        libero_modules()
        from libero.libero.envs import OffScreenRenderEnv

        with quiet():
            envs = [
                OffScreenRenderEnv(bddl_file_name=LiberoEnv(EnvSpec("libero_10", task)).task.bddl, camera_heights=64,
                                   camera_widths=64) for task in (0, 1, 7)
            ]  # fmt: skip
            for episode in range(episodes):
                envs[episode % 3].reset()
                for action in pressing_actions(3, episode):
                    envs[episode % 3].step(action)
                if episode + 1 in (3, 6, episodes):
                    rows[episode + 1] = resident()
    return {"name": name, "episodes": episodes, "after": rows}


def memory(folder: Path, episodes: int, reference_episodes: int) -> None:
    path = folder / "memory.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, n in (("ours", episodes), ("libero", reference_episodes)):
        if name not in found:
            command = [sys.executable, __file__, "--remember", name, "--episodes", str(n)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
            write_json(path, found)


# ---- summary
COMPARED = [  # metric, mode, ours, reference, name of the reference
    *[("control step without cameras", mode, mode, "robosuite", "robosuite 1.4 env.step, LIBERO's model") for mode in MODES],
    *[("control step without cameras", mode, mode, "bound", "bare mj_step, the controls of fast") for mode in MODES],
    ("step with looks", "exact, 256 pixels, a look every step", "ours, every step", "lerobot", "lerobot LiberoEnv, 256 pixels"),
    ("step with looks", "exact, 256 pixels, a look every 10 steps", "ours", "lerobot", "lerobot LiberoEnv, 256 pixels"),
    ("step with looks", "fast, 64 pixels, 8 mm, a look every 10 steps", "ours, fast, 64 pixels, 8 mm", "lerobot",
     "lerobot LiberoEnv, 256 pixels"),
    ("reset", "native", "ours", "libero", "LIBERO reset and set_init_state"),
    ("construction", "empty cache", "ours, empty cache", "libero", "LIBERO ControlEnv"),
    ("construction", "filled cache", "ours, filled cache", "libero", "LIBERO ControlEnv"),
]  # fmt: skip


def summary(records: list[dict]) -> list[dict]:
    """Rows of medians (seconds) and of ratios reference / ours: per task the ratio of its medians, then over tasks."""
    rows = []
    for metric, mode, ours, reference, name in COMPARED:
        key = "step" if metric.startswith("control") else metric
        pairs = [(np.median(r["seconds"][key][ours]), np.median(r["seconds"][key][reference])) for r in records]
        ratios = [b / a for a, b in pairs]
        rows.append({
            "metric": f"{metric}, CPU s", "mode": mode, "ours": float(np.median([a for a, _ in pairs])),
            "reference": float(np.median([b for _, b in pairs])), "reference_name": name,
            "ratio_median": float(np.median(ratios)), "ratio_min": min(ratios), "ratio_max": max(ratios), "n": len(ratios),
        })  # fmt: skip
    return rows


def memory_rows(folder: Path) -> list[dict]:
    path = folder / "memory.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    last = {name: run["after"][str(run["episodes"])]["resident_mb"] for name, run in found.items()}
    ratio = last["libero"] / last["ours"]
    return [{"metric": "memory of a worker with three tasks and cameras, MB resident", "mode": "fast, 64 pixels, 8 mm",
             "ours": last["ours"], "reference": last["libero"], "reference_name": "LIBERO OffScreenRenderEnv",
             "ratio_median": ratio, "ratio_min": ratio, "ratio_max": ratio, "n": 1}]  # fmt: skip


def scaling_rows(folder: Path) -> list[dict]:
    """Of benchmarks/sim_scaling.py: steps a second against one process of the same mode; of two runs, the less disturbed."""
    rows = [row for path in sorted(folder.glob("scaling*.json")) for row in json.loads(path.read_text())]
    best = {(r["mode"], r["workers"], r["kind"]): r for r in sorted(rows, key=lambda r: -r["others"])}
    found = [best[key] for key in sorted(best)]
    one = {row["mode"]: row["steps_per_s_median"] for row in found if (row["kind"], row["workers"]) == ("processes", 1)}
    return [
        {"metric": f"control steps a second without cameras, {row['workers']} {row['kind']}", "mode": row["mode"],
         "ours": row["steps_per_s_median"], "reference": one[row["mode"]],
         "reference_name": f"one process; others used {row['others']:.0%} of the cores",
         **{f"ratio_{name}": row[f"steps_per_s_{name}"] / one[row["mode"]] for name in ("median", "min", "max")},
         "n": row["repeats"]}
        for row in found
    ]  # fmt: skip


def write(folder: Path) -> None:
    records = read_jsonl(folder / "tasks.jsonl")
    if not records:
        return
    rows = summary(records) + memory_rows(folder) + scaling_rows(folder)
    write_json(folder / "summary.json", rows)
    equal = [{k: r[k] for k in ("suite", "task_id")} | r["equivalence"] for r in records]
    episodes = folder / "episodes.json"  # of benchmarks/sim_episodes.py
    write_json(folder / "equivalence.json", equal + (json.loads(episodes.read_text()) if episodes.exists() else []))
    for row in rows:
        print("{metric}; {mode}; against {reference_name}: {ratio_median:.2f} times [{ratio_min:.2f}, {ratio_max:.2f}], "
              "n = {n}; ours {ours:.4g}, reference {reference:.4g}".format(**row))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("results/sim"))
    parser.add_argument("--limit", type=int, default=len(TASKS), help="tasks to measure in this run")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--episodes", type=int, default=200, help="of ours, for memory")
    parser.add_argument("--reference_episodes", type=int, default=6)
    parser.add_argument("--remember", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.remember:
        print(json.dumps(remember(args.remember, args.episodes)))
        return
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "tasks.jsonl"
    done = {(r["suite"], r["task_id"]) for r in read_jsonl(path)}
    for suite, task_id in [task for task in TASKS if task not in done][: args.limit]:
        if not args.memory:
            record = measure(suite, task_id)
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
    if args.memory:
        memory(args.output_dir, args.episodes, args.reference_episodes)
    write(args.output_dir)


if __name__ == "__main__":
    main()

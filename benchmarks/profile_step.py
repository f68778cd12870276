"""Where the time of one control step goes, mode by mode, against the bound: bare `mj_step` with the controls of `fast`.

    python benchmarks/profile_step.py --suite libero_10 --task_id 0 --output_dir results/sim

Every line is measured over the same walk, in blocks that take turns: CPU ms a control step (25 substeps), median over blocks.
MuJoCo's stages are timed one by one, in a replay that must end in `mj_step`'s own bits, and scaled to add up to it, since
calling them from Python costs something too. "Python around the call" is a step whose native call does nothing.
Writes profile.json, a table a task.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import mujoco
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sim import MODES, bound, controls_of, pressing_actions
from sim.libero import EnvSpec, LiberoEnv
from vla_wmrl.tracking import write_json

STAGES = {  # in the order of mj_step (MuJoCo 3.3, Euler); what is left out does nothing in LIBERO's models
    "kinematics and inertia": ("mj_kinematics", "mj_comPos", "mj_camlight", "mj_tendon", "mj_crb", "mj_factorM"),
    "collision": ("mj_collision",),
    "constraints": ("mj_makeConstraint", "mj_island", "mj_transmission"),
    "velocity, actuation": ("mj_sensorPos", "mj_fwdVelocity", "mj_sensorVel", "mj_fwdActuation", "mj_fwdAcceleration"),
    "constraint solve": ("mj_fwdConstraint",),
    "integration": ("mj_sensorAcc", "mj_Euler"),
}
BLOCK = 20  # control steps


def by_stage(env: LiberoEnv, controls: np.ndarray) -> dict[str, float]:
    """Seconds of every stage over `controls`; `env` moves on."""
    model, data, clock = env.model, env.data, time.thread_time
    stages = {name: [getattr(mujoco, f) for f in functions] for name, functions in STAGES.items()}
    spent = dict.fromkeys(stages, 0.0)
    model.opt.jacobian = mujoco.mjtJacobian.mjJAC_SPARSE
    for control in controls:
        data.ctrl[:] = control
        for name, functions in stages.items():
            start = clock()
            for function in functions:
                function(model, data)
            spent[name] += clock() - start
    model.opt.jacobian = mujoco.mjtJacobian.mjJAC_AUTO
    return spent


def hollow(env: LiberoEnv, actions: np.ndarray) -> None:
    """Everything of `env.step` but the substeps."""
    stepper, data = env._stepper, env.data

    def nothing(action: np.ndarray, observe=None) -> None:
        stepper.run(action, 0, 0)
        data.time += 1.0  # else it would count as diverged

    own, stepper.step = stepper.step, nothing
    for action in actions:
        env.step(action)
    stepper.step = own
    data.time -= len(actions)


def cpu(call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def block(envs: dict[str, LiberoEnv], actions: np.ndarray) -> dict[str, float]:
    """Seconds a control step of every line, over one block; all environments move on by it."""
    out: dict[str, float] = {}
    fast = envs["fast"]
    start, replay = fast.snapshot(), bound(fast, actions)
    out["bare mj_step"] = cpu(replay)
    end = fast.data.qpos.copy()
    fast.restore(start)
    controls = controls_of(fast, actions)
    spent = by_stage(fast, controls)
    for name in spent:
        out[f"  {name}"] = spent[name] * out["bare mj_step"] / sum(spent.values())
    if not np.array_equal(end, fast.data.qpos):
        raise RuntimeError("the stages do not add up to mj_step in this version of MuJoCo")
    fast.restore(start)
    for mode in MODES:
        env = envs[mode]
        before = env.snapshot()
        out[f"{mode}: native call"] = cpu(lambda env=env: [env._stepper.run(a) for a in actions])
        env.restore(before)
        out[f"{mode}: whole step"] = cpu(lambda env=env: [env.step(a) for a in actions])
    out["robosuite: whole step"] = cpu(lambda: [envs["robosuite"].step(a) for a in actions])
    out["Python around the call"] = cpu(lambda: hollow(fast, actions))
    control = fast._control.env
    out["LIBERO's _post_process, in Python"] = cpu(lambda: [control._post_process() for _ in actions])
    out["LIBERO's goal predicates, in Python"] = cpu(lambda: [control._check_success() for _ in actions])
    return {name: spent / len(actions) for name, spent in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="libero_10")
    parser.add_argument("--task_id", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--output_dir", type=Path, default=Path("results/sim"))
    args = parser.parse_args()
    envs = {mode: LiberoEnv(EnvSpec(args.suite, args.task_id, 0, mode, placements=1)) for mode in (*MODES, "robosuite")}
    actions = pressing_actions(BLOCK * (args.blocks + 1))
    for env in envs.values():
        env.reset(env.official_states[0])
    blocks = [block(envs, some) for some in np.split(actions, args.blocks + 1)][1:]  # the first compiles
    rows = {name: 1000 * float(np.median([b[name] for b in blocks])) for name in blocks[0]}
    whole = rows["bare mj_step"]
    table = [{"what": name.strip(), "ms": ms, "of_bound": ms / whole} for name, ms in rows.items()]
    for mode in MODES:
        extra = rows[f"{mode}: native call"] - whole
        table.append({"what": f"{mode}: controller, further solves", "ms": extra, "of_bound": extra / whole})
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path, mine = args.output_dir / "profile.json", {"suite": args.suite, "task_id": args.task_id}
    others = [found for found in (json.loads(path.read_text()) if path.exists() else []) if not mine.items() <= found.items()]
    write_json(path, [*others, mine | {"freedoms": int(envs["fast"].model.nv), "rows": table}])
    for row in table:
        print("{what:42} {ms:7.3f} ms  {of_bound:6.1%} of the bound".format(**row))


if __name__ == "__main__":
    main()

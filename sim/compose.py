"""From configuration to the objects of this package: environment specs, policy references, pools."""

from __future__ import annotations

import os

from sim.libero import EnvSpec
from sim.rollout import PolicyRef
from sim.workers import Pool
from vla_wmrl.config import EnvConfig, PolicyConfig, WorkersConfig
from vla_wmrl.errors import require


def env_spec(env: EnvConfig, task_id: int) -> EnvSpec:
    return EnvSpec(env.suite, task_id, env.image_size, env.stepping, env.lod_mm, env.multisample, env.markers)


def policy_ref(policy: PolicyConfig, eta: float | None = None) -> PolicyRef:
    """The policy of a config; `eta` overrides its noise (0: the deterministic sampler of evaluation)."""
    require(policy.path is not None and os.path.isdir(policy.path), f"no checkpoint folder at --policy.path={policy.path}")
    return PolicyRef(policy.path, policy.eta if eta is None else eta, policy.sde, policy.n_action_steps,
                     policy.noise_components, None if policy.noise_scale is None else tuple(policy.noise_scale), policy.noise_design,
                     policy.num_steps)  # fmt: skip


def make_pool(workers: WorkersConfig) -> Pool:
    if workers.pool == "ray":
        from sim.ray_pool import RayPool

        return RayPool(workers.n, workers.timeout_s, workers.rebuilds, workers.ray_address, workers.gpus)
    return Pool(workers.n or os.cpu_count() or 1, workers.timeout_s, workers.rebuilds)

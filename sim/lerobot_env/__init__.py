"""Our LIBERO as an environment of lerobot: what `--env.discover_packages_path=sim.lerobot_env` imports.

lerobot-eval --env.discover_packages_path=sim.lerobot_env --env.type=vla_wmrl_libero --policy.path=...
"""

from sim.lerobot_env.config import LeRobotLibero, LiberoConfig

__all__ = ["LeRobotLibero", "LiberoConfig"]

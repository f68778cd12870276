"""Real LIBERO-Long task 0, built once per test session; a toy scene for what needs no robot."""

import pytest

from sim.libero import EnvSpec, LiberoEnv

SPEC = EnvSpec(task_id=0, image_size=32, stepping="fast", lod_mm=8.0, multisample=0)

TOY = """
<mujoco>
  <asset>
    <texture name="seen" type="2d" builtin="checker" width="64" height="32" rgb1="1 0 0" rgb2="0 1 0"/>
    <texture name="unseen" type="cube" builtin="gradient" width="64" height="64" rgb1="1 0 0" rgb2="0 1 0"/>
    <material name="seen" texture="seen"/>
    <material name="unseen" texture="unseen"/>
    <mesh name="hard" vertex="0 0 0  .1 0 0  0 .1 0  0 0 .1"/>
    <mesh name="soft" vertex="0 0 0  .2 0 0  0 .2 0  0 0 .2"/>
  </asset>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="eye" pos="0 -1 .6" xyaxes="1 0 0 0 .5 1"/>
    <geom type="plane" size="1 1 1" material="seen" group="1"/>
    <body pos="0 0 .3">
      <freejoint/>
      <geom type="mesh" mesh="hard" material="unseen" group="0"/>
      <geom type="mesh" mesh="soft" group="1" contype="0" conaffinity="0" rgba="0 0 1 1"/>
    </body>
  </worldbody>
</mujoco>
"""


@pytest.fixture(scope="session")
def env():
    made = LiberoEnv(SPEC)
    yield made
    made.close()


@pytest.fixture(scope="session")
def toy():
    """XML: a mesh that collides and is hidden, one that is shown and does not collide, a texture for each."""
    return TOY

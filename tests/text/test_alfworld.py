"""ALFWorld: the fast engine says what stock TextWorld says; a wrong file or command cannot pass for success."""

import json
import multiprocessing
import zlib

import numpy as np
import pytest

from text_agents import alfworld, alfworld_games, alfworld_scenes, alfworld_stock, alfworld_text, alfworld_translate
from text_agents.alfworld_games import NOTHING_HAPPENS, Machine, find_games, games_hash, open_game
from vla_wmrl.errors import UserError


def test_transcripts_are_those_of_stock_textworld(parity_games):
    stock = alfworld_stock.StockGame()
    for game in parity_games:
        assert alfworld_stock.walk(game, 15) == stock.walk(game, 15), game.name


def test_names_are_numbered_as_alfworld_numbers_them(games):
    from alfworld.agents.utils.misc import Demangler

    entities = games[0].machine.entities
    demangler = Demangler(game_infos=entities)
    assert {i: e.name for i, e in entities.items()} == {i: demangler.demangle_alfred_name(i) for i in entities}


def test_every_walkthrough_wins_within_its_length(games):
    for game in games:
        episode = alfworld.play(game, alfworld.walkthrough_agent(game))
        assert episode.success and episode.steps == len(game.walkthrough), game.name
        assert not episode.invalid and not episode.truncated


def test_a_command_that_is_not_admissible_changes_nothing_and_costs_a_step(games):
    env = alfworld.AlfworldEnv(max_steps=2)
    env.reset(games[0])
    before = env.state
    result = env.step("go to the moon")
    assert result.observation.text == NOTHING_HAPPENS and env.state is before
    assert (result.reward, result.info["kind"], result.truncated) == (0.0, "invalid", False)
    assert env.step("look").truncated


def test_a_state_can_be_continued_from_twice_without_touching_it(games):
    game = games[0]
    state, _ = game.start()
    command = next(c for c in state.admissible if c.startswith("go to"))
    first, text = game.step(state, command)
    assert command in state.admissible and command not in first.admissible
    assert game.step(state, command)[1] == text
    env = alfworld.AlfworldEnv(max_steps=5)
    assert env.continue_from(game, first, steps=4).admissible == tuple(first.admissible)
    assert env.step("look").truncated


def test_actions_are_counted_as_the_paper_names_them():
    admissible = ["look", "examine desk 1", "go to desk 1", "inventory", "help"]
    kinds = [alfworld.kind_of(c, admissible) for c in ("fly", "look", "examine desk 1", "go to desk 1", "inventory")]
    assert kinds == ["invalid", "inefficient", "inefficient", "effective", "inefficient"]


def test_a_result_names_versions_and_games_and_adds_up(games):
    episodes = [alfworld.play(game, alfworld.random_agent, "train", seed=1, max_steps=10) for game in games[:2]]
    summary = alfworld.summarize(episodes, games[:2])
    assert {"alfworld", "textworld", "fast-downward-textworld"} <= set(summary["versions"])
    assert summary["games_hash"] == games_hash(games[:2]) == games_hash(games[1::-1]) != games_hash(games[:1])
    share = summary["all"]["invalid_or_inefficient"]
    assert share == pytest.approx(sum(e.invalid + e.inefficient for e in episodes) / sum(e.steps for e in episodes))
    with pytest.raises(UserError, match="no episodes"):
        alfworld.summarize([], [])


def test_an_episode_does_not_depend_on_the_episodes_before_it(games):
    alone = alfworld.play(games[1], alfworld.random_agent, seed=3, max_steps=8)
    alfworld.play(games[0], alfworld.random_agent, seed=3, max_steps=8)
    assert alfworld.play(games[1], alfworld.random_agent, seed=3, max_steps=8) == alone


def test_a_damaged_cache_file_is_rebuilt_and_not_believed(games, tmp_path):
    data = games[0].data
    tables = alfworld_translate.tables_of(data["pddl_domain"], data["pddl_problem"], tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    forged = zlib.compress(json.dumps({"sas": "x"}).encode())
    for damaged in (b"", whole[: len(whole) // 2], whole[:40] + b"\0" + whole[41:], whole[:32] + forged):
        path.write_bytes(damaged)
        assert alfworld_translate.tables_of(data["pddl_domain"], data["pddl_problem"], tmp_path) == tables
        assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "drafts are left behind"


def _translate(arguments):
    return alfworld_translate.tables_of(*arguments).sas


def test_processes_that_fill_the_cache_at_once_leave_one_whole_file(games, tmp_path):
    data = games[0].data
    job = (data["pddl_domain"], data["pddl_problem"], tmp_path)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        results = pool.map(_translate, [job] * 3)
    assert len(set(results)) == 1 and len(list(tmp_path.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_a_warning_and_not_a_failure(games, tmp_path):
    (tmp_path / "file").write_text("")
    data = games[0].data
    with pytest.warns(UserWarning, match="not kept"):
        assert alfworld_translate.tables_of(data["pddl_domain"], data["pddl_problem"], tmp_path / "file" / "x").sas


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("grammar"), "no grammar"),
        (lambda d: d.update(grammar=alfworld_games.OLD_GRAMMAR), "before 0.4"),
        (lambda d: d.update(grammar="action {"), "does not parse"),
        (lambda d: d.update(grammar=d["grammar"].replace("{r.name}", "{r.__class__}")), "not allowed"),
        (lambda d: d.update(grammar=d["grammar"].replace("{r.name}", "{open('x')}")), "not allowed"),
        (lambda d: d.update(pddl_problem="(define"), "does not translate"),
    ],
)
def test_a_wrong_game_file_is_one_clear_line(change, words, games, tmp_path):
    data = dict(games[0].data)
    change(data)
    path = tmp_path / "t-a-None-b-1" / "trial" / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=words) as error:
        open_game(path).start()
    assert "\n" not in str(error.value)


def test_missing_games_say_how_to_get_some(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(UserError, match="vla-wmrl text games"):
        find_games("train")
    with pytest.raises(UserError, match="vla-wmrl text games"):
        find_games("train", str(tmp_path))
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="has no game"):
        find_games("train", str(tmp_path))
    with pytest.raises(UserError, match="did you mean valid_unseen"):
        find_games("valid_unsen", str(tmp_path))


def test_the_same_seed_writes_the_same_games_and_unseen_rooms_are_not_trained_on(games_folder, tmp_path):
    alfworld_scenes.write_games(tmp_path, {"train": 2}, seed=0)
    mine = sorted(tmp_path.rglob("game.tw-pddl"))
    assert len(mine) == 2
    for path in mine:
        assert path.read_bytes() == (games_folder / path.relative_to(tmp_path)).read_bytes()
    scene = {split: {g.name.split("/")[0].split("-")[-1] for g in find_games(split, str(games_folder))} for split in
             ("train", "valid_seen", "valid_unseen")}  # fmt: skip
    assert scene["valid_seen"] <= scene["train"] and not scene["valid_unseen"] & scene["train"]
    with pytest.raises(UserError, match="holds games"):
        alfworld_scenes.write_games(tmp_path, {"train": 1})


def test_every_task_type_can_be_generated_and_solved():
    seen = {}
    for number in range(4):
        for task in alfworld_scenes.possible_tasks(alfworld_scenes.make_scene(number, 0)):
            seen.setdefault(task[0], (number, task))
    assert set(seen) == set(alfworld_games.TASK_TYPES)
    for number, task in seen.values():  # make_game plays the walkthrough and fails unless it wins
        name, data, traj = alfworld_scenes.make_game(number, 0, task)
        assert name.startswith(task[0]) and traj["task_type"] == task[0] and data["walkthrough"]


def test_no_generated_task_is_won_at_the_start(games):
    for game in games:
        state, _ = game.start()
        assert not game.won(state)


def test_queries_never_give_two_placeholders_the_same_object():
    types = [["object", []]]
    facts = alfworld_text.Facts({"a": "object", "b": "object"}, [("near", "a", "a"), ("near", "a", "b")])
    grammar = alfworld_text.Grammar({}, {}, {})
    writer = alfworld_text.Writer(grammar, alfworld_text.entities_of("ab", {"a": "object", "b": "object"}), types)
    found = list(writer.assignments("near(x:object, y:object)", facts, {}))
    assert found == [{("x", "object"): "a", ("y", "object"): "b"}]


def test_machines_share_nothing_that_changes(games):
    one, two = Machine(games[0].data), Machine(games[0].data)
    a, b = one.start()[0], two.start()[0]
    for command in ("look", next(c for c in a.admissible if c.startswith("go to"))):
        a, text_a = one.step(a, command)
        b, text_b = two.step(b, command)
        assert text_a == text_b and np.array_equal(a.admissible, b.admissible)


def test_a_game_can_let_go_of_its_tables_and_be_played_on(games):
    game = open_game(games[0].path)
    state, _ = game.start()
    game.release()
    assert "machine" not in vars(game) and "data" not in vars(game)
    command = next(c for c in state.admissible if c.startswith("go to"))
    assert game.step(state, command)[1] == games[0].step(games[0].start()[0], command)[1]

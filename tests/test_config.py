"""Configs: wrong input is refused with one line that helps, and arms mean what their name says."""

from pathlib import Path

import pytest

from vla_wmrl import arguments
from vla_wmrl.arms import ARMS, MIXED_ARMS, dotted
from vla_wmrl.config import TrainConfig
from vla_wmrl.config_commands import DemosConfig, EvalConfig, SftConfig
from vla_wmrl.errors import UserError

OK = ["--policy.path=p", "--world_model.path=w"]
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def load(*argv, cls=TrainConfig, **kwargs):
    return arguments.load(cls, [*OK, *argv] if cls is TrainConfig else list(argv), **kwargs)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--grpo.group_sise=4"], "did you mean grpo.group_size"),
        (["--lr=1"], "did you mean grpo.lr"),
        (["--grpo=4"], "is a section"),
        (["--env.suite=libero_long"], "did you mean libero_10"),
        (["--env.suite=libero_gaol"], "did you mean libero_goal"),
        (["--env.task_ids=10"], "tasks 0 to 9, not 10"),
        (["--env.task_ids=0,0"], "twice"),
        (["--grpo.group_size=1"], "at least 2 rollouts"),
        (["--grpo.group_size=many"], "grpo.group_size"),
        (["--groups.kind=brnach"], "branch"),
        (["--groups.score=margin", "--debias.wait=false"], "is no reward"),
        (["--world_model.look_noise=true", "--groups.kind=episode"], "fill the bank of starts"),
        (["--eval.init_ids=50"], "ids run from 0 to 49"),
        (["--env.init_ids=2000"], "ids run from 0 to 1999"),
        (["--env.split=official"], "share 50 initial states"),
        (["--env.split=papers", "--eval.init_ids=15,16"], "share 1 initial states"),
        (["--arm=real", "--anchors.fraction=0.5"], "arm=real fixes anchors.fraction to 1.0"),
        (["--arm=mix", "--anchors.fraction=1"], "between 0 and 1"),
        (["--policy.eta=0"], "no log-probability"),
        (["steps=3"], "options look like --key=value"),
        (["--config_path=configs/none.yaml"], "no config file"),
    ],
)
def test_wrong_input_is_one_clear_line(argv, words):
    with pytest.raises(UserError, match=words) as error:
        load(*argv)
    assert "\n" not in str(error.value)


def test_unknown_key_in_a_file_names_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("grpo:\n  clip_high: 0.3\n")
    with pytest.raises(UserError, match=r"grpo\.clip_high.*c\.yaml"):
        load(f"--config_path={tmp_path / 'c.yaml'}")


def test_naming_one_key_of_a_section_keeps_the_other_defaults_that_the_command_gives_it(tmp_path):
    """`eval --env.task_ids=1` evaluated training states with fast stepping: the section's own defaults came back."""
    for argv in (["--policy.path=p", "--env.task_ids=1"], ["--policy.path=p", f"--config_path={tmp_path / 'c.yaml'}"]):
        (tmp_path / "c.yaml").write_text("env:\n  task_ids: [1]\n")
        env = arguments.load(EvalConfig, argv).env
        assert (env.task_ids, env.split, env.stepping, env.lod_mm, env.multisample) == ([1], "official", "exact", 0.0, 4)


def test_the_command_line_beats_the_file_and_the_file_the_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 3\ngrpo: {lr: 1e-4, n_groups: 5}\nenv: {task_ids: [1, 2]}\n")
    cfg = load(f"--config_path={tmp_path / 'c.yaml'}", "--grpo.n_groups", "6")
    assert (cfg.seed, cfg.grpo.lr, cfg.grpo.n_groups, cfg.env.task_ids) == (3, 1e-4, 6, [1, 2])


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_reachable_from_a_saved_run_of_every_other(arm, tmp_path):
    for other in ARMS:
        arguments.save(load(f"--arm={other}"), tmp_path / "c.yaml")
        extra = ["--anchors.fraction=0.1"] if arm in MIXED_ARMS else []
        cfg = load(f"--config_path={tmp_path / 'c.yaml'}", f"--arm={arm}", *extra)
        assert all(dotted(cfg, name) in allowed for name, allowed in ARMS[arm].items())


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_runs_from_the_main_config_with_nothing_else_named(arm):
    """The ablation does: a switch of the main config that an arm cannot have would stop it at its first cell."""
    main = next(path for path in CONFIGS if path.name == "libero_long.yaml")
    assert load(f"--config_path={main}", f"--arm={arm}").arm == arm


def test_an_arm_keeps_the_alternatives_it_allows():
    assert load("--arm=denoise", "--fusion.kind=ppi").fusion.kind == "ppi"


def test_a_saved_config_reads_back_equal(tmp_path):
    cfg = load("--arm=debias", "--env.task_ids=0-9", "--grpo.dual_clip=null", "--workers.n=2")
    arguments.save(cfg, tmp_path / "c.yaml")
    assert arguments.load(TrainConfig, [f"--config_path={tmp_path / 'c.yaml'}"]) == cfg
    assert cfg.env.task_ids == list(range(10)) and cfg.grpo.dual_clip is None


def test_papers_split_trains_and_evaluates_on_different_states():
    cfg = load("--env.split=papers")
    assert cfg.env.train_inits == list(range(16)) and cfg.eval.ids("papers") == list(range(16, 50))
    assert cfg.overlap() == []


def test_demonstrations_of_official_states_need_an_explicit_flag():
    with pytest.raises(UserError, match="allow_overlap"):
        load("--env.split=official", cls=DemosConfig)


def test_evaluation_ids_are_checked_and_explicit():
    assert load("--policy.path=p", "--init_ids=3-5", cls=EvalConfig).ids() == [3, 4, 5]
    with pytest.raises(UserError, match="50 official"):
        load("--policy.path=p", "--episodes_per_task=51", cls=EvalConfig)
    with pytest.raises(UserError, match=r"--policy\.path"):
        load(cls=EvalConfig)
    with pytest.raises(UserError, match=r"--dataset\.root"):
        load(cls=SftConfig)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_configs_load_as_they_are(path):
    from importlib import import_module

    from vla_wmrl.cli import COMMANDS, TEXT_AGENTS

    command, following = path.read_text().splitlines()[0].split("vla-wmrl ")[1].split()[:2]
    known = COMMANDS
    if command in TEXT_AGENTS:
        known, command = import_module(TEXT_AGENTS[command]).COMMANDS, following
    found = known[command]
    arguments.load(found[0] if isinstance(found, tuple) else found, [f"--config_path={path}"])


def test_help_shows_every_field_with_its_comment():
    text = arguments.help_text(TrainConfig, "train")
    for name in arguments.fields(TrainConfig):
        assert f"--{name}=" in text
    assert "smooth noise on the result" in text

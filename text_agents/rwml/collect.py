"""`vla-wmrl text triplets`: rollouts on ALFWorld or tau2-bench, cut into (history, action, next state)."""

from __future__ import annotations

import json

from text_agents import alfworld, tau2_data
from text_agents.alfworld_games import NOTHING_HAPPENS, Game, find_games, games_hash
from text_agents.config import TripletsConfig
from text_agents.language_policy import LanguagePolicy
from text_agents.play import make_agent
from text_agents.rl.config import EpisodesSection
from text_agents.rl.episodes import EpisodeRollout, GameWorld, describe, roll
from text_agents.rwml import known
from text_agents.rwml import triplets as data
from text_agents.rwml.schema import mask_answer
from text_agents.tau2 import REPLAY_STEPS, Tau2Env, Tau2Task, ground_truth_actions
from vla_wmrl.progress import Progress
from vla_wmrl.types import Start


def of_alfworld(game: Game, episode: alfworld.Episode | EpisodeRollout, rollout: int) -> list[data.Triplet]:
    """Triplets of an ALFWorld episode. What answers "Nothing happens." was an invalid action."""
    valid = [seen != NOTHING_HAPPENS for seen in episode.observations[1:]]
    return data.from_episode("alfworld", game.name, game.task, rollout, episode.commands, episode.observations, valid=valid)


def of_tau2(task: Tau2Task, actions: list[str] | None = None, user=None, rollout: int = 0) -> list[data.Triplet]:
    """Triplets of a tau2 episode of given actions (default: the task's own), tools' answers masked to their schema.

    The prompt's "task" is what is known about the user; what the user wants is not in it.
    """
    env = Tau2Env(user, max_steps=REPLAY_STEPS)
    observations, kinds, valid, done = [env.reset(task).text], [], [], []
    for action in ground_truth_actions(task) if actions is None else actions:
        result = env.step(action)
        source, text = result.info["source"], result.observation.text
        done.append(action)
        kinds.append("user" if source == "user" else "tool")
        observations.append(mask_answer(text) if source == "tool" else text)
        valid.append(result.info["kind"] != "invalid")
        if result.terminated or result.truncated:
            break
    return data.from_episode(
        f"tau2-{task.domain}", task.task_id, env.known_user_info(), rollout, done, observations, kinds, valid
    )


def main(cfg: TripletsConfig) -> None:
    found, source = _collect_tau2(cfg) if cfg.env == "tau2" else _collect_alfworld(cfg)
    unique = data.without_duplicates(found)
    kept = data.drop_invalid(unique, cfg.keep_invalid, cfg.seed)
    train, val = data.split_by_task(kept, cfg.val, cfg.seed)
    source |= {"env": cfg.env, "agent": cfg.agent, "seed": cfg.seed, "triplets_before": len(found)}
    source |= {"duplicates_removed": len(found) - len(unique), "invalid_removed": len(unique) - len(kept)}
    if cfg.env == "alfworld" and kept:  # what the prompt of a small preset (two turns) and a whole one determine
        source |= {"known_of_2_turns": known.shares(kept, 2), "known_of_all_turns": known.shares(kept)}
    print(json.dumps(data.write(cfg.output_dir, {"train": train, "val": val}, source), indent=1))


def _collect_alfworld(cfg: TripletsConfig) -> tuple[list[data.Triplet], dict]:
    games = find_games(cfg.split, cfg.data, cfg.task_types, cfg.limit)
    found, more = (_conversations if cfg.agent == "policy" else _episodes)(cfg, games)
    samples = cfg.agent in ("model", "policy")
    source = {
        "split": cfg.split, "task_types": cfg.task_types, "games": len(games), "games_hash": games_hash(games),
        "model": cfg.model.path if samples else None, "rollouts": cfg.rollouts,
        "temperature": cfg.model.temperature if samples else None, "max_steps": cfg.max_steps, "versions": alfworld.versions(),
    }  # fmt: skip
    return found, source | more


def _episodes(cfg: TripletsConfig, games: list[Game]) -> tuple[list[data.Triplet], dict]:
    """One episode after the other, of an agent that is asked anew at each step."""
    agent_for, model = make_agent(cfg.agent, cfg.model)
    found = []
    with Progress(len(games), "games") as progress:
        for game in games:
            for rollout in range(cfg.rollouts):
                episode = alfworld.play(game, agent_for(game), cfg.split, cfg.seed * 1000 + rollout, cfg.max_steps)
                found += of_alfworld(game, episode, rollout)
            game.release()
            progress.update(1, f"{len(found)} triplets")
    return found, model.counts() if model else {}


def _conversations(cfg: TripletsConfig, games: list[Game]) -> tuple[list[data.Triplet], dict]:
    """Episodes of a policy as `text rl` trains it, side by side."""
    policy = LanguagePolicy.from_pretrained(
        cfg.model.path, device=cfg.model.device, temperature=cfg.model.temperature, template=cfg.model.template, seed=cfg.seed
    )
    how = EpisodesSection(max_steps=cfg.max_steps, list_commands=False)
    together = max(1, how.batch // cfg.rollouts)
    found: list[data.Triplet] = []
    played: list[EpisodeRollout] = []
    with Progress(len(games), "games") as progress:
        for first in range(0, len(games), together):
            some = games[first : first + together]
            starts = [Start(i, first + i) for i in range(len(some))]
            groups = roll(
                policy, GameWorld(some, cfg.max_steps), starts, cfg.rollouts, (cfg.seed,), how, cfg.model.max_new_tokens,
                cfg.model.max_prompt_tokens,
            )  # fmt: skip
            for game, group in zip(some, groups, strict=True):
                for rollout, episode in enumerate(group):
                    found += of_alfworld(game, episode, rollout)
                played += group
            progress.update(len(some), f"{len(found)} triplets")
    return found, {f"episode_{name}": value for name, value in describe(played).items()}


def _collect_tau2(cfg: TripletsConfig) -> tuple[list[data.Triplet], dict]:
    tasks = [Tau2Task(d, i) for d in cfg.domains for i in tau2_data.task_ids(d, cfg.task_split)]
    if cfg.limit is not None and cfg.limit < len(tasks):  # of every domain
        tasks = [tasks[i * len(tasks) // cfg.limit] for i in range(cfg.limit)]
    found = []
    with Progress(len(tasks), "tasks") as progress:
        for task in tasks:
            found += of_tau2(task)
            progress.update(1, f"{len(found)} triplets")
    return found, {
        "split": cfg.task_split, "domains": cfg.domains, "tasks": len(tasks), "rollouts": 1, "user": "scripted",
        "versions": tau2_data.versions(),
    }  # fmt: skip

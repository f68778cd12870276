"""`vla-wmrl text triplets`: rollouts on ALFWorld, cut into (history, action, next state)."""

from __future__ import annotations

import json

from text_agents import alfworld
from text_agents.alfworld_games import NOTHING_HAPPENS, find_games, games_hash
from text_agents.config import TripletsConfig
from text_agents.play import make_agent
from text_agents.rwml import triplets as data
from text_agents.rwml.schema import mask_answer
from text_agents.tau2 import REPLAY_STEPS, Tau2Env, Tau2Task, ground_truth_actions


def of_alfworld(game, episode: alfworld.Episode, rollout: int) -> list[data.Triplet]:
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
    games = find_games(cfg.split, cfg.data, limit=cfg.limit)
    agent_for, model = make_agent(cfg.agent, cfg.model)
    found = []
    for i, game in enumerate(games, start=1):
        for rollout in range(cfg.rollouts):
            episode = alfworld.play(game, agent_for(game), cfg.split, cfg.seed * 1000 + rollout, cfg.max_steps)
            found += of_alfworld(game, episode, rollout)
        game.release()
        if i % 20 == 0 or i == len(games):
            print(f"{i}/{len(games)} games, {len(found)} triplets", flush=True)
    unique = data.without_duplicates(found)
    kept = data.drop_invalid(unique, cfg.keep_invalid, cfg.seed)
    train, val = data.split_by_task(kept, cfg.val, cfg.seed)
    source = {
        "env": "alfworld", "split": cfg.split, "games": len(games), "games_hash": games_hash(games), "agent": cfg.agent,
        "model": cfg.model.path if model else None, "rollouts": cfg.rollouts, "temperature": cfg.model.temperature,
        "max_steps": cfg.max_steps, "seed": cfg.seed, "versions": alfworld.versions(), "triplets_before": len(found),
        "duplicates_removed": len(found) - len(unique), "invalid_removed": len(unique) - len(kept),
    }  # fmt: skip
    source |= model.counts() if model else {}
    print(json.dumps(data.write(cfg.output_dir, {"train": train, "val": val}, source), indent=1))

"""Loads the models and runs that a page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ZooError
from ...fileio import get_nested, is_finite
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refs import resolve
from ...hub.client.run_signature import TRUST_RUN_FLAG
from ...plugins import REWARDS, load_object, split_settings
from ...publishing.cards.card import card_json
from ...publishing.cards.facts import StageFacts
from ...publishing.catalog.ablation import find_runs
from ...publishing.catalog.card import Card
from ...publishing.catalog.lineage import Lineage, find_lineage
from ...rewards import Rewards
from ...runs.record import StageRecord
from ...runs.trusted_names import may_import
from ..engine import Comparison, Limits, RuleRewards, Timeline, TimelineRun
from .held_out import find_stage_folder, read_held_out_columns, read_held_out_prompts

LIMITS = Limits()
#: Limits on the policies of the timeline that stay loaded: their number and their total size in bytes.
MAX_CACHED_MODELS, MAX_CACHED_BYTES = 8, 2 * 2**30

#: Time limits in seconds for the rules' score of one completion. The first call may have to load a dictionary or model.
FIRST_RULE_SECONDS, RULE_SECONDS = 60.0, 2.0


@dataclass(frozen=True)
class PageModels:
    """The loaded models that a page compares, their lineage, and the runs whose checkpoints it shows.

    Attributes:
        comparison: The loaded models.
        lineage: Their lineage.
        timeline: The runs; None if no checkpoint of the run is available.
        problem: A sentence on why there is no timeline or why runs are missing; None if no run is missing.
        held_out_prompts: Prompts to draw from; () for those of the card, which are also the page's examples.
    """

    comparison: Comparison
    lineage: Lineage
    timeline: Timeline | None = None
    problem: str | None = None
    held_out_prompts: tuple[str, ...] = ()

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts from which the page draws at random."""
        return self.held_out_prompts or tuple(self.lineage.prompts)

    @property
    def prompt_hint(self) -> str:
        """The placeholder of an empty prompt box: what a prompt for these models is."""
        return "A message to the models" if self.comparison.is_chat else "The beginning of a text"

    @classmethod
    def load(
        cls,
        ppo: str,
        *,
        sft: str | None = None,
        reward: str | None = None,
        runs: Sequence[str] | None = None,
        skip_unreadable: bool = False,
        hub: Hub = DEFAULT_HUB,
    ) -> PageModels:
        """Fetches and loads the models of a PPO checkpoint.

        Args:
            ppo: NAMESPACE/NAME[@TAG] or a folder.
            sft: The SFT model, in the same form; None to use the one in the checkpoint's lineage.
            reward: The reward model, in the same form; None to use the one in the checkpoint's lineage.
            runs: Other runs of its ablation; None to look them up on the Hub. Ignored if `ppo` is a folder.
            skip_unreadable: Whether to skip the other runs if one cannot be read, and to say so in `problem`.
            hub: The Hub to fetch from.

        Raises:
            ZooError: A model cannot be fetched.
        """
        lineage = find_lineage(ppo, sft=sft, reward=reward, hub=hub)
        loader = lineage.reward_loader if reward is None else None
        skip_loader = loader is not None and not _may_load(loader, find_stage_folder(Path(lineage.ppo.name)))
        comparison = Comparison.load(
            ppo=lineage.ppo.path,
            sft=lineage.sft.path,
            reward=() if skip_loader else [model.path for model in lineage.rewards],
            reward_kwargs=lineage.reward_load_kwargs,
            loader=None if skip_loader else loader,
            rules=None if lineage.rewards else _load_rules(lineage, hub),
            limits=LIMITS,
            initial_policy=Card(lineage.card).initial_policy,
        )
        timeline_runs, problem = _find_timeline_runs(lineage, runs, skip_unreadable=skip_unreadable, hub=hub)
        timeline = None
        if timeline_runs:
            timeline = Timeline(
                comparison,
                timeline_runs,
                fetch=lambda name: resolve(name, hub).path,
                max_models=MAX_CACHED_MODELS,
                max_bytes=MAX_CACHED_BYTES,
            )
        # Held-out prompts must leave room for a completion as long as in training.
        length = max(int(lineage.setting("response_length", 1)), 1)
        prompts = read_held_out_prompts(lineage, lambda prompt: comparison.check(prompt, max_new_tokens=length), hub)
        return cls(comparison, lineage, timeline, problem, tuple(prompts))


def _load_rules(lineage: Lineage, hub: Hub) -> RuleRewards | None:
    """Loads the reward functions of PPO; None if the card names none, or if one needs code that may not run."""
    settings = lineage.card.get("settings")
    names, weights = (get_nested(settings, key) for key in ("reward_funcs", "reward_weights"))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    weights = [1.0] * len(names) if weights is None else weights
    if not isinstance(weights, list) or len(weights) != len(names) or not all(map(is_finite, weights)):
        return None
    names = [name for name, weight in zip(names, weights, strict=True) if weight]
    if not names or not all(map(_may_run, names)):
        return None
    functions = [load_object(name, group=REWARDS) for name in names]
    return RuleRewards(
        Rewards(functions, weights=list(filter(None, weights)), timeout=FIRST_RULE_SECONDS),
        read_held_out_columns(lineage, hub),
        later_timeout=RULE_SECONDS,
    )


def _may_run(rule: str) -> bool:
    """Whether a rule that a card names may run for visitors. Patterns may not: a hostile one could take forever."""
    return may_import(rule, REWARDS) and "pattern" not in (split_settings(rule)[1] or {})


def _may_load(loader: str, stage_folder: Path | None) -> bool:
    """Whether a card's loader may run: only if the user's own run directory names the same loader in run.json.

    `stage_folder` is None for a repository. Raises ZooError for a run directory that the user's rlhf-zoo did not write.
    """
    if stage_folder is None:
        return False
    record = StageRecord(stage_folder)
    if not record.is_own():
        raise ZooError(
            f"{record.run_file} was not written by your rlhf-zoo, or was changed since, and the run's reward model "
            f"needs {loader}: name another model with --reward, or add {TRUST_RUN_FLAG} if you trust this run."
        )
    return bool(get_nested(record.read(), "resolved", "reward_model_loader") == loader)


def _find_timeline_runs(
    lineage: Lineage, run_names: Sequence[str] | None, *, skip_unreadable: bool, hub: Hub = DEFAULT_HUB
) -> tuple[list[TimelineRun], str | None]:
    """Returns the runs that have checkpoints, the PPO checkpoint's own first, and why some are missing (or None)."""
    folder = Path(lineage.ppo.name)
    if folder.is_dir():
        run = None
        stage_folder = find_stage_folder(folder)
        if stage_folder is not None:
            try:
                StageRecord(stage_folder).check_own()
            except ZooError as error:
                return [], str(error)
            run = TimelineRun.from_card(card_json(StageFacts.read(stage_folder, None)), stage_folder)
        if run is None or not run.points:
            return [], f"{folder} has no checkpoints beside it: pass the run's PPO stage directory, or a repository."
        return [run], None
    problem = None
    try:
        ablation = find_runs(lineage.ppo.name, lineage.card, names=run_names, hub=hub)
    except ZooError as error:
        if not skip_unreadable:
            raise
        problem = f"The other runs are not shown: {error}"
        ablation = find_runs(lineage.ppo.name, lineage.card, names=(), hub=hub)
    all_runs = [TimelineRun.from_listing(entry.listing, entry.card) for entry in ablation.runs]
    runs = [run for run in all_runs if run.points]
    # The first run is the PPO checkpoint's own, without which the page shows no timeline.
    if not runs or runs[0].name != ablation.runs[0].repo:
        own_problem = f"{ablation.runs[0].repo} has no checkpoint with a tag: publish the steps of its run."
        return [], ablation.problem or own_problem
    return runs, problem or ablation.problem

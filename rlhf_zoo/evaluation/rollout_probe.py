"""`probe`: reads rollouts of any trainer, probes them against SFT's rollouts, and decides the verdict."""

from collections.abc import Mapping
from pathlib import Path

from ..errors import ZooError
from ..hub.client.connect import DEFAULT_HUB, Hub
from .judge_pairs import check_judge
from .probes import Completions
from .rollout_files import Rollouts, Side, read_rollouts
from .rollouts import RolloutFindings, group_sides, probe_rollouts


def probe(
    policy: Rollouts,
    reference: Rollouts,
    *,
    model: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    reward: str | None = None,
    verifiable: bool = False,
    labeled: Rollouts | None = None,
    own_pairs: Rollouts | None = None,
    embedder: str | Path | None = None,
    seed: int = 1,
    hub: Hub = DEFAULT_HUB,
) -> RolloutFindings:
    """Tests completions of any trainer for a hacked reward, and decides the verdict, as `rlhf-zoo probe` does.

    Args:
        policy: The policy's completions: a file, rows such as a list of dicts or a `datasets.Dataset`, or
            `Completions`. Each row has prompt and completion, and optionally reward, judge, group and logprobs. The
            samples.jsonl of an evaluation holds both sides, so it may be the reference too.
        reference: The SFT model's completions of the same prompts, or the base model's if the policy started there.
        model: The SFT model, a folder or a Hub id; two probes need its log-probabilities. They are cached on disk, so
            an interrupted call resumes where it stopped. The model's chat template renders conversations.
        device: The torch device of the model, such as "cuda:1"; None for the accelerator, if there is one.
        dtype: The torch dtype of the model's weights in memory, such as "bfloat16"; None for float32.
        reward: The column of the reward; None for reward or score.
        verifiable: Whether the reward is a program that checks answers, so that it serves as the judge too.
        labeled: Pairs of other texts, which can show that the judge is unfit, in a file or as rows: prompt, chosen (the
            better text), rejected, and the judge's scores judge_chosen and judge_rejected. Scores may be missing for
            texts in `policy` or `reference`. reward_chosen and reward_rejected show whether judge and reward make the
            same errors.
        own_pairs: Pairs of completions in `policy` and `reference`, in the same form. Labels for 20 prompts or more
            decide by themselves. Without a verifiable reward, only a judge that passes on such pairs shows `better`.
        embedder: A sentence embedder, a folder or a Hub id such as sentence-transformers/all-MiniLM-L6-v2, which finds
            answers to another prompt even in other words; None for no such probe.
        seed: Seed of permutations and intervals.
        hub: The Hub on which to look up Hub ids; by default that of huggingface_hub.

    Returns:
        The findings, with `verdict.kind`, `verdict.reasons`, and each probe in `report`.

    Raises:
        ZooError: A file or a row is wrong, the two sides share no prompt or have different columns, the model cannot
            be loaded or run, or two arguments exclude each other.

    Example:
        result = rlhf_zoo.probe("rollouts.jsonl", [{"prompt": "2+2?", "completion": "4"}])
        result.verdict.text, result.report.fired
    """
    if model is None and (device or dtype):
        raise ZooError("device and dtype say how a model runs: give the SFT model too (--model), or leave them out.")
    if verifiable and (labeled is not None or own_pairs is not None):
        raise ZooError("A verifiable reward judges itself: remove --labeled and --own_pairs, or --verifiable.")
    sides = {}
    roles: tuple[tuple[str, Rollouts, Side], ...] = (("policy", policy, "ppo"), ("reference", reference, "sft"))
    for role, source, side in roles:
        name = str(source) if isinstance(source, str | Path) else role
        # Both sides may be the same file: the samples.jsonl of an evaluation, or one that is compared with itself.
        rollouts = read_rollouts(source, reward=reward, name=name, side=side)
        sides[f"{name} (reference)" if name in sides else name] = rollouts
    policy_side, sft_side = sides.values()
    if not set(policy_side.prompts) & set(sft_side.prompts):
        raise ZooError(f"{' and '.join(sides)} share no prompt: sample both for the same prompts.")
    _check_same_columns(sides, check_logprobs=model is None)
    judge_check = check_judge([policy_side, sft_side], labeled=labeled, own=own_pairs, seed=seed)
    if model is not None:
        # torch and transformers are imported only if a model is given.
        from .rollout_logprobs import ModelOptions, add_logprobs

        options = ModelOptions(model, hub, device, dtype or "float32")
        policy_side, sft_side = add_logprobs(policy_side, sft_side, options, seed=seed)
    if embedder is not None:
        from .embedding_ranks import add_meaning_ranks

        policy_side, sft_side = add_meaning_ranks(*group_sides(policy_side, sft_side), str(embedder), hub)
    return probe_rollouts(policy_side, sft_side, verifiable=verifiable, judge_check=judge_check, seed=seed)


def _check_same_columns(sides: Mapping[str, Completions], *, check_logprobs: bool) -> None:
    """Checks that both sides have the same columns, and that a prompt has the same group on both."""
    fields = {"reward": "rewards", "judge": "judge_scores", "group": "groups"}
    if check_logprobs:
        fields["logprobs"] = "logprobs"
    for name, field in fields.items():
        sides_without = [side for side, completions in sides.items() if getattr(completions, field) is None]
        if len(sides_without) == 1:
            other = next(side for side in sides if side not in sides_without)
            raise ZooError(
                f"{sides_without[0]} has no {name}, but {other} does: provide it in both files or in neither."
            )
    group_of: dict[str, object] = {}
    for completions in sides.values():
        for prompt, group in completions.group_by_prompt.items():
            if group_of.setdefault(prompt, group) != group:
                raise ZooError(
                    f"{' and '.join(sides)} have the groups {group_of[prompt]!r} and {group!r} for one prompt, "
                    f"{prompt[:60]!r}: give it the same group in both."
                )

"""Writes the top of a card, above its folded sections: verdict on PPO, main figures, an example, how it was trained."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...fileio import hub_id, is_finite
from ...runs.record import StageRecord
from ...runs.registry import PARENT_TITLES
from ...runs.settings.declared import default_of
from . import commands
from .estimates import estimate_at
from .facts import StageFacts
from .markdown import SOURCE, Raw, code, escape, judge_title, short, shorten, with_interval
from .watch_out import counter_evidence

_ALERTS = {"healthy": "TIP", "no sign found": "NOTE", "hacked": "CAUTION"}
#: Kinds of verdict whose reasons say nothing against the policy.
_KINDS_WITHOUT_SIGNS = ("healthy", "no sign found")
_MAX_PROMPT, _MAX_COMPLETION = 120, 100  # maximum characters in an example, so that it fits a phone
_NBSP = "\N{NO-BREAK SPACE}"  # keeps a figure and its note on one line of a phone
_MAX_COMMAND = 120  # maximum characters of a command in a table


def kind_of_verdict(facts: StageFacts) -> str | None:
    """Returns the kind of the verdict over the checkpoints, such as "healthy"; None where no verdict was computed.

    Args:
        facts: The facts of the stage.
    """
    trajectory = facts.evaluation.get("over_training") or {}
    kind = trajectory.get("kind") or trajectory.get("verdict")  # `kind` is the verdict without numbers
    return str(kind) if trajectory.get("checkpoints") else None


def verdict(facts: StageFacts) -> dict[str, Raw]:
    """Returns the verdict on a PPO run and what to do about it.

    Args:
        facts: The facts of the stage.

    Returns:
        {alert: the kind of box, text: the verdict and the advice, fetch: the command that downloads the recommended
        step, reasons: sentences}. `fetch` is "" if no step is recommended or that step is not published; `reasons` is
        "" without a verdict.
    """
    trajectory = facts.evaluation.get("over_training") or {}
    kind = kind_of_verdict(facts)
    if kind is None:
        problem = f" {escape(trajectory['problem'])}" if trajectory.get("problem") else ""
        gain = _gain_sentence(facts, facts.estimate("win_rate"))
        text = f"**No verdict.**{problem} {gain} Read the samples before you use it."
        return {"alert": Raw("NOTE"), "text": Raw(text), "fetch": Raw(""), "reasons": Raw("")}
    last_step = trajectory.get("step") or trajectory["checkpoints"][-1]["step"]
    recommended_step = trajectory.get("recommended")
    title = "Verdict" if last_step == facts.described_step else f"Verdict at step {last_step}"
    shown_verdict, step_verdict = trajectory, trajectory.get("at_recommended")
    # If the card describes the recommended step, the verdict on that step replaces the verdict on the last one.
    if step_verdict and step_verdict["step"] == facts.described_step:
        title, shown_verdict, kind = "Verdict", {**trajectory, **step_verdict}, str(step_verdict["kind"])
    reasons = [_verdict_reason(facts, kind, shown_verdict), _step_reason(facts, trajectory)]
    if kind in _KINDS_WITHOUT_SIGNS or recommended_step == facts.described_step:
        reasons.append(counter_evidence(facts))
    return {
        "alert": Raw(_ALERTS.get(kind, "WARNING")),
        "text": Raw(f"**{title}: {escape(shown_verdict['verdict'])}.** {_advice(facts, kind, recommended_step)}"),
        "fetch": _fetch_command(facts, recommended_step),
        "reasons": Raw(" ".join(filter(None, reasons))),
    }


def _gain_sentence(facts: StageFacts, win_rate: Mapping[str, Any] | None) -> str:
    if not win_rate or not win_rate.get("ci95"):
        return "Nothing here shows whether PPO helped: evaluate the run."
    low, high = win_rate["ci95"]
    return (
        f"The judge prefers it to {facts.initial_policy}." if low > 0.5
        else f"The judge prefers {facts.initial_policy}." if high < 0.5
        else f"The judge shows no difference from {facts.initial_policy}."
    )  # fmt: skip


def _verdict_reason(facts: StageFacts, kind: str, trajectory: Mapping[str, Any]) -> str:
    probes = trajectory["probes"]["probes"]
    families = [probe["family"] for probe in probes if probe["fired"]]
    families = trajectory.get("fired", families)  # the entry of the recommended step lists its own
    if kind == "healthy":
        if families:
            findings = escape(", ".join(families))
            return f"Judge and reward rise together, so what probes found does not count as hacking: {findings}."
        return f"Judge and reward rise together, and none of {len(probes)} probes for reward hacking fired."
    if kind.startswith("no sign found"):
        return "No probe for reward hacking fired, but the judge is unchecked, so this proves little."
    if kind == "suspicious":
        unexplained_families = [name for name in families if name not in (trajectory.get("explained") or ())]
        return f"Probes find signs of hacking that nothing explains: {escape(', '.join(unexplained_families))}."
    if kind == "no gain":
        return f"Readers would not notice a gain over {facts.initial_policy}."
    if kind == "gain not shown" and trajectory.get("disagree"):
        win = f", {with_interval(win_rate)}," if (win_rate := trajectory.get("win_rate")) else ""
        return f"On validation prompts the judge's mean changed, but the win rate{win} does not confirm that."
    if kind == "gain not shown":
        return "There may be a gain, but it is too small for this evaluation to show."
    if kind.startswith("past the peak"):
        return "The judge's score has fallen since that peak."
    reason = str((trajectory.get("reasons") or [""])[0]).removeprefix("Hacked: ")
    return escape(reason[:1].upper() + reason[1:])


def _advice(facts: StageFacts, kind: str, recommended_step: int | None) -> str:
    """Returns a sentence on which checkpoint to use; it ends with a colon if the command that downloads it follows."""
    if recommended_step is None:
        return {
            "hacked": "Do not use it.",
            "no gain": f"Use the {facts.initial_policy_title} model.",
            "gain not shown": f"Use the {facts.initial_policy_title} model, or evaluate on more prompts.",
        }.get(kind, "No checkpoint is recommended: read the samples before you use one.")
    step = facts.described_step
    which = "(this page, `main`)" if step == recommended_step else f"instead of this one, step {step}"
    return f"Use **step {recommended_step}** {which}{':' if _fetch_command(facts, recommended_step) else '.'}"


def _step_reason(facts: StageFacts, trajectory: Mapping[str, Any]) -> str:
    """Returns a sentence on why that step is recommended; "" if none is."""
    step, recommended_step = facts.described_step, trajectory.get("recommended")
    if recommended_step is None:
        return ""
    reason = _recommendation_reason(facts, trajectory, recommended_step)
    sentence = f"{reason[:1].upper()}{reason[1:]}"
    if step != recommended_step:
        return f"{sentence}{_judge_means(step, trajectory)}."
    last_step, step_verdict = trajectory["checkpoints"][-1]["step"], trajectory.get("at_recommended")
    if last_step == step or not step_verdict:
        return f"{sentence}."
    if step_verdict["verdict"] == trajectory["verdict"]:
        return f"Step {last_step}, the last, is *{escape(trajectory['verdict'])}* too, but {reason}."
    last_verdict = escape(trajectory["verdict"].partition(" (")[0])
    return f"{sentence}. Training went on to step {last_step}, where the verdict is *{last_verdict}*."


def _judge_means(step: int | None, trajectory: Mapping[str, Any]) -> str:
    """Returns the judge's means at the recommended step and at `step`, in brackets; "" if `step` was not judged."""
    means = {row["step"]: row["judge"]["value"] for row in trajectory["checkpoints"]}
    if step not in means:
        return ""
    there, here = short(means[trajectory["recommended"]]), short(means[step])
    return f" (judge's score {there} there, {here} here, on validation prompts)"


def _recommendation_reason(facts: StageFacts, trajectory: Mapping[str, Any], recommended_step: int) -> str:
    """Returns why a step is recommended.

    The rule: leave out checkpoints with signs of hacking, keep those that the judge rates about as high as the best of
    the others, and recommend the one with the lowest KL.
    """
    rows = {row["step"]: row for row in trajectory["checkpoints"]}
    best_step = max(rows.values(), key=lambda row: row["judge"]["value"])["step"]
    last_step = trajectory["checkpoints"][-1]["step"]
    if best_step == recommended_step:
        return f"the judge rates step {recommended_step} highest"
    explained_families = trajectory.get("explained") or ()
    signs = [family for family in rows[best_step].get("fired") or () if family not in explained_families]
    # Had the best step been eligible, its lower KL would have made it the recommended one.
    if signs and rows[best_step]["kl"]["value"] < rows[recommended_step]["kl"]["value"]:
        signs_text = escape(", ".join(signs))
        return f"the judge rates step {best_step} highest, but probes find signs of hacking there ({signs_text})"
    # Without another step, a reader compares with the last one.
    is_last_farther = rows[last_step]["kl"]["value"] > rows[recommended_step]["kl"]["value"]
    clause = f"step {recommended_step} stays closer to {facts.initial_policy}"
    clause += "" if is_last_farther else f" than step {best_step}"
    return f"no step scores clearly higher by the judge, and {clause}"


def _fetch_command(facts: StageFacts, recommended_step: int | None) -> Raw:
    """Returns the command that downloads the recommended step; "" if no step is recommended, or it is not published."""
    row = next((row for row in facts.checkpoints if row.step == recommended_step), None)
    command = None
    if row is not None and row.step == facts.described_step:
        command = commands.download_command(facts)
    elif row is not None and row.commit and facts.repo_id:
        command = commands.download_revision_command(facts, row.tag)
    return code(command) if command else Raw("")


def best_constant_texts(facts: StageFacts) -> dict[str, Mapping[str, Any]]:
    """Returns the constant texts (one text for every prompt) with the highest win rate and the highest reward.

    Args:
        facts: The facts of the stage.

    Returns:
        "win_rate" or "reward" -> the best constant's entry in evaluation.json; {} if no constant was scored.
    """
    policies = (facts.evaluation.get("trivial") or {}).get("policies") or ()
    best = {}
    for key in ("win_rate", "reward"):
        constants = [policy for policy in policies if policy.get("kind") == "constant" and estimate_at(policy, key)]
        if constants:
            best[key] = max(constants, key=lambda policy: policy[key]["value"])
    return best


def example(facts: StageFacts) -> dict[str, Any] | None:
    """Returns a prompt with both answers: the pair whose gain by the judge is the median.

    Pairs that the judge rates equal are left out. If it rates all equal, the reward takes its place.

    Args:
        facts: The facts of the stage.

    Returns:
        {prompt, sft, ppo, measure}, where `measure` is "judge", "reward" or None (no pair differs); None if no prompt
        has samples of both policies.
    """
    rows = [row for row in facts.samples if all(isinstance(row.get(side), Mapping) for side in ("sft", "ppo"))]
    if not rows:
        return None
    measure = next((key for key in ("judge", "reward") if any(_gain(row, key) for row in rows)), None)
    if measure is not None:
        rows = [row for row in rows if _gain(row, measure)]
        rows.sort(key=lambda row: (_gain(row, "judge"), _gain(row, "reward")))
    row = rows[len(rows) // 2 if measure else 0]
    texts = {side: shorten(row[side]["completion"], _MAX_COMPLETION) for side in ("sft", "ppo")}
    return {"prompt": shorten(row["prompt"], _MAX_PROMPT), **texts, "measure": measure}


def _gain(row: Mapping[str, Any], key: str) -> float:
    before, after = row["sft"].get(key), row["ppo"].get(key)
    return float(after) - float(before) if is_finite(before) and is_finite(after) else 0.0


def links(facts: StageFacts) -> Raw:
    """Returns links to related models and data, to the model's figures, and to the guide on cards.

    The embedded Hub has no fixed address, so its repositories are named without a link.

    Args:
        facts: The facts of the stage.
    """
    linked_repos = _link_to_ppo(facts)
    for role, parent in facts.parents.items():
        if (name := hub_id(parent["repo"])) is not None:
            is_base = role == "sft" and facts.ppo_starts_from_base
            title = "base model" if is_base else _LINK_TITLES.get(role, role)
            linked_repos.append((title, f"datasets/{name}" if role == "data" else name))
    hub = facts.hub_label.rstrip("/")
    parts = [
        f"{title} {code(name.removeprefix('datasets/'))}" if hub == "local" else f"[{title}]({hub}/{name})"
        for title, name in linked_repos
    ]
    if facts.is_trusted:
        parts += ["[all figures](rlhf_card.json)", "[training log](metrics.jsonl)"]
    parts += [f"[install rlhf-zoo]({SOURCE}/README.md#install)", f"[how to read this card]({SOURCE}/docs/cards.md)"]
    return Raw(" · ".join(parts))


_LINK_TITLES = {**PARENT_TITLES, "base": "base model", "sft": "SFT model", "value": "value model", "data": "data"}


def trained_with(facts: StageFacts) -> Iterator[tuple[str, Raw]]:
    """Yields the lines of "Trained with": recipe, settings, time, and the command that repeats it.

    Args:
        facts: The facts of the stage.
    """
    versions, run = facts.run.get("versions") or {}, facts.run
    version = versions.get("rlhf-zoo") or versions.get("rlhf_zoo")
    seed = f"seed {run['seed']}" if run.get("seed") is not None else ""
    yield (
        "Recipe",
        Raw(", ".join(filter(None, (code(facts.recipe), f"rlhf-zoo {escape(version)}" if version else "", seed)))),
    )
    settings = list(_setting_phrases(facts))
    if is_finite(run.get("seconds")) and facts.step is None:
        last_step, subject = facts.last_step or 0, "the whole run"
        if (facts.described_step or 0) < last_step:
            subject = f"all {last_step:,} {'updates' if facts.stage == 'ppo' else 'steps'}"
        settings.append(f"{subject} took {_duration(run['seconds'])}{_machine(versions, run)}")
    if settings:
        yield _STAGE_TITLES.get(facts.stage, facts.stage), Raw(", ".join(settings))
    command = commands.training_command(facts)
    yield "Repeat it", code(command) if len(command) <= _MAX_COMMAND else Raw("the command in the last fold")


def _machine(versions: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Returns a phrase for the GPU or the number of CPU threads that trained; "" if the run does not record it."""
    gpu, threads = versions.get("gpu"), versions.get("threads")
    if gpu and not (run.get("resolved") or {}).get("use_cpu"):
        return f" on {escape(gpu)}"
    return f" on {escape(threads)} CPU thread{'' if threads == '1' else 's'}" if threads else ""


_STAGE_TITLES = {"sft": "SFT", "reward": "Reward model", "ppo": "PPO"}


def _setting_phrases(facts: StageFacts) -> Iterator[str]:
    step, episodes = facts.described_step, facts.latest_metrics.get("episodes")
    if facts.stage == "ppo":
        if step and is_finite(episodes):
            yield f"{step:,} updates, {round(episodes):,} completions"
        yield f"β {short(facts.latest_metrics.get('kl_coef', facts.setting('kl_coef', default_of('ppo', 'kl_coef'))))}"
    elif step:
        yield f"{step:,} optimizer steps"
    if facts.is_adapter:
        yield f"LoRA of rank {facts.setting('lora_r', default_of(facts.stage, 'lora_r'))}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def headline(facts: StageFacts) -> dict[str, Any] | None:
    """Returns the table of PPO's main figures, as Markdown cells, and the note below it.

    Args:
        facts: The facts of the stage.

    Returns:
        {rows: (title, SFT, PPO), note}; None before an evaluation.
    """
    if not facts.estimate("ppo", "reward") and not facts.estimate("win_rate"):
        return None
    control, sft_kl = facts.estimate("control"), facts.estimate("sft", "kl")
    is_sft_kl_zero = sft_kl is not None and abs(sft_kl["value"]) < 0.001
    rows = [
        (
            f"**Win rate over {facts.initial_policy}**",
            f"{short(control['value'])}{_NBSP}¹" if control else "",
            bold(facts.estimate("win_rate")),
        ),
        (
            f"**KL to {facts.initial_policy}**, nats",
            "0" if is_sft_kl_zero else short((sft_kl or {}).get("value")),
            bold(facts.estimate("ppo", "kl")),
        ),
        (
            "**Reward**",
            short((facts.estimate("sft", "reward") or {}).get("value")),
            bold(facts.estimate("ppo", "reward")),
        ),
        *_judge_rows(facts),
    ]
    raw_rows = [tuple(Raw(cell) for cell in row) for row in rows]
    return {"rows": raw_rows, "note": Raw(" ".join(_notes(facts))) if is_finite(facts.evaluation.get("n")) else ""}


def _notes(facts: StageFacts) -> Iterator[str]:
    """Yields sentences on what the figures of `headline` measure, and on what one text for every prompt would reach."""
    n, prompt_count = facts.evaluation["n"], facts.evaluation.get("prompts")
    group_count = facts.evaluation.get("groups", prompt_count)
    in_groups = f" in {short(group_count)} groups" if is_finite(group_count) and group_count != prompt_count else ""
    judge = (facts.evaluation.get("judge") or {}).get("name", "not named")
    yield f"Judge: {escape(judge_title(judge))}."
    completions = "" if n == prompt_count else f"{short(n)} completions to "
    unit = "groups" if in_groups else "prompts"
    yield f"{completions}{short(prompt_count)} prompts{in_groups}; 95% intervals over {unit}."
    if facts.best_filter is not None:
        yield f"Filtered: {escape(facts.best_filter['name'])}."
    best_constants = best_constant_texts(facts)
    winner, favorite = best_constants.get("win_rate"), best_constants.get("reward")
    if winner is not None:
        sentence = f"The best fixed text tried wins {short(winner['win_rate']['value'])}"
        if favorite is winner:
            sentence += f", with reward {short(winner['reward']['value'])}"
        elif favorite is not None and (win_rate := estimate_at(favorite, "win_rate")):
            reward = short(favorite["reward"]["value"])
            sentence += f"; the reward's favorite gets reward {reward} and wins {short(win_rate['value'])}"
        yield f"{sentence}."
    if facts.estimate("control"):
        yield f"¹ {facts.initial_policy[:1].upper()}{facts.initial_policy[1:]} sampled again: chance alone."


def _judge_rows(facts: StageFacts) -> Iterator[tuple[str, str, str]]:
    """Yields the rows of `headline` with the judge's mean of SFT and PPO, and of filtered SFT if filters were tried.

    A judge that is the training reward gets no row of its own, because the reward has one.
    """
    ppo, sft = facts.estimate("ppo", "judge"), facts.estimate("sft", "judge")
    if ppo and sft and not (facts.evaluation.get("judge") or {}).get("is_training_reward"):
        yield "**Judge's score**", short(sft["value"]), bold(ppo)
    if (best := facts.best_filter) is not None and (filtered := estimate_at(best, "judge")):
        yield f"Judge's score of filtered {facts.initial_policy_title}", short(filtered["value"]), "–"


def bold(figure: Mapping[str, Any] | None) -> Raw:
    """Formats an estimate as "**0.95** (0.93–0.96)".

    Args:
        figure: {value, ci95}.
    """
    value, space, interval = with_interval(figure).partition(" (")
    return Raw(f"**{value}**{space}{interval}")


def examples(facts: StageFacts, side: str) -> list[tuple[str, str]]:
    """Returns the first two held-out prompts, each with its first answer.

    Args:
        facts: The facts of the stage.
        side: "sft" or "ppo".
    """
    answers: dict[str, str] = {}
    for row in facts.samples:
        if isinstance(row.get(side), Mapping):
            answers.setdefault(str(row["prompt"]), str(row[side]["completion"]))
    pairs = list(answers.items())[:2]
    return [(shorten(prompt, _MAX_PROMPT), shorten(answer, _MAX_COMPLETION)) for prompt, answer in pairs]


def _link_to_ppo(facts: StageFacts) -> list[tuple[str, str]]:
    """Returns [(title, repository)] of the run's PPO policy; [] if it is not published or has another parent."""
    if facts.step is not None or not facts.is_trusted or facts.stage == "ppo":
        return []
    run = StageRecord(facts.path.parent / "ppo").read()
    parent = (run.get("parents") or {}).get(facts.stage) or {}
    name = hub_id((run.get("repo") or {}).get("id"))
    if name is None or parent.get("fingerprint") not in (None, facts.run.get("fingerprint")):
        return []
    return [("PPO made from it" if facts.stage == "sft" else "PPO trained on it", name)]

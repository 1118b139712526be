"""Writes the report on an evaluation of any policy, and adds it to the card of a published policy."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import is_finite
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.pull import split_revision
from ...hub.client.refusals import translate_hub_errors
from ...modeling.prompt_keys import format_group_count, format_prompt_count
from .markdown import Raw, code, escape, estimate

WIN_RATES_PLOT = "win_rates.png"
#: Figures of both policies: key -> label.
FIGURES = {
    "reward": "reward",
    "judge": "judge",
    "kl": "KL, nats per completion",
    "exact_kl": "exact KL, nats per completion",
    "length": "length, tokens",
    "eos_rate": "ended with EOS, share",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "repetition": "repetition",
    "sft_perplexity": "perplexity under the other policy",
}
_SAME_LABELS_NOTE = (
    "**Same labels:** it was trained on the reward model's labels and shares their errors, so it cannot rule out "
    "reward hacking."
)
_INDEPENDENCE_NOTES = {
    True: "Its mistakes do not follow the reward model's, on these pairs.",
    False: "**It is not independent of the reward model: it shares its errors, so it cannot rule out reward hacking.**",
    None: "These pairs do not show whether it is independent of the reward model.",
}
#: The caveat about judges that check answers, whether or not PPO was also trained on that reward.
_CHECKS_ANSWERS_NOTE = (
    "It checks whether an answer is right, so it may be both judge and reward. Compare the strict and the lenient "
    "reading: a policy may only learn to write answers in the expected form."
)
READINGS = {"strict": "strictly (in the expected place)", "lenient": "leniently (anywhere)"}


def slug(name: str) -> str:
    """Turns the name of a model into a file name: NAMESPACE/NAME@TAG becomes NAMESPACE--NAME--TAG.

    Args:
        name: The name.
    """
    return re.sub(r"[^\w.-]+", "--", name.strip("./")).strip("-") or "policy"


def report(document: Mapping[str, Any]) -> str:
    """Returns the Markdown report of `rlhf-zoo eval POLICY --against OTHER`: a table, and descriptions of the judges.

    Args:
        document: The content of evaluation.json.
    """
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    policy_name, other_name = (_checkpoint_name(document[side]) for side in ("policy", "against"))
    yield f"## Evaluation against {other_name}"
    yield ""
    if document["policy"].get("tag") not in (None, "main"):
        yield f"These figures are for {policy_name}, which may differ from the checkpoint that this card describes."
        yield ""
    yield f"| held-out prompts | {other_name} | {policy_name} | n | difference, paired |"
    yield "|---|---|---|---|---|"
    for key, title in FIGURES.items():
        other, policy = (document[side].get(key) for side in ("sft", "ppo"))
        if policy is not None:
            is_zero_kl = key in ("kl", "exact_kl") and abs(other["value"]) < 1e-3
            cell = "0: it is the reference" if is_zero_kl else estimate(other)
            change = document["difference"].get(key)
            yield f"| {title} | {cell} | {estimate(policy)} | {policy['n']} | {estimate(change) if change else ''} |"
    for description, other, policy, change in answer_rows(document["judges"]):
        cell = estimate(change) if change else ""
        yield f"| {escape(description)} | {estimate(other)} | {estimate(policy)} | {policy['n']} | {cell} |"
    for name, judge in document["judges"].items():
        yield f"| **win rate**, by {escape(name)} | | {estimate(judge['win_rate'])} | {judge['win_rate']['n']} | |"
    for name, votes in (document.get("votes") or {}).items():
        win_rate = votes.get("win_rate")
        cell = estimate(win_rate) if win_rate else escape(votes["problem"])
        yield f"| **win rate**, by votes of {escape(name)} | | {cell} | {(win_rate or {}).get('n', '')} | |"
    yield f"| win rate at equal length | | {estimate(document['win_rate_at_equal_length'])} | {document['n']} | |"
    control = estimate(document["control"])
    yield f"| control: the other policy against itself, another sampling seed | {control} | | {document['n']} | |"
    yield ""
    source = f"the {escape(document['split'])} split of {code(document['data']['location'])}"
    n_samples = document["samples_per_prompt"]
    in_groups = format_group_count(document.get("groups"), document["prompts"])
    yield (
        f"{format_prompt_count(document['prompts'], document.get('rows', document['prompts']))} prompts"
        f"{in_groups} of {source}, "
        f"{n_samples} completion{'' if n_samples == 1 else 's'} per row, the same prompts and seeds for both, "
        f"temperature {document['temperature']:g}, at most {document['max_new_tokens']} new tokens, seed "
        f"{document['seed']}. In brackets: 95% intervals over {'groups' if in_groups else 'prompts'}, paired for "
        "differences; n counts completions. A tie counts one half."
    )
    for name, judge in document["judges"].items():
        yield ""
        yield f"**Judge:** {escape(name)}. {escape(judge['description'])}{judge_notes(judge)}"
    yield ""
    yield f"Made by {code(document['command'])}."


def answer_rows(judges: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields table rows on correct answers, for the judges that check answers.

    Args:
        judges: Name -> the judge's entry in evaluation.json.

    Yields:
        (description, estimate for the other policy, for the policy, for the paired difference). The last is None if it
        was not measured.
    """
    for name, judge in judges.items():
        for reading, sides in ((judge.get("answers") if isinstance(judge, Mapping) else None) or {}).items():
            policy, other = sides["ppo"], sides["sft"]
            description = f"correct answers by {name}, read {READINGS.get(reading, reading)}"
            yield description, other["accuracy"], policy["accuracy"], sides["difference"]
            largest_k = max(map(int, policy["pass_at"]))
            for key, title in (("majority_at", "the majority of {} is correct"), ("pass_at", "pass@{}")):
                if largest_k > 1 and key in policy:
                    reading_title = READINGS.get(reading, reading).partition(" ")[0]
                    yield (
                        f"{title.format(largest_k)}, read {reading_title}",
                        other[key][str(largest_k)],
                        policy[key][str(largest_k)],
                        None,
                    )


def judge_notes(judge: Mapping[str, Any]) -> Raw:
    """Returns caveats about a judge: sentences, each after a space.

    Args:
        judge: The judge's entry in evaluation.json.
    """
    notes = []
    if judge.get("checks_answers"):
        notes.append(_CHECKS_ANSWERS_NOTE)
        notes += _reading_notes(judge.get("answers"))
    elif judge.get("is_training_reward"):
        notes.append(
            "**This is the policy's own reward: it shows that training worked, not that the policy got better.**"
        )
    notes += _check_notes(judge.get("check") or {})
    if split_half := judge.get("split_half"):
        notes.append(f"Its scores on two halves of the samples have a rank correlation of {estimate(split_half)}.")
    orders = judge.get("orders")
    if orders and orders.get("agreement"):
        agreement = estimate(orders["agreement"])
        notes.append(f"It judges pairs in both orders, and agrees with itself on {agreement} of them.")
    if note := unparsed_note(judge):
        notes.append(note)
    cost = (judge.get("usage") or {}).get("cost")
    if is_finite(cost):
        notes.append(f"Cost: {cost:.4g}.")
    return Raw("".join(f" {note}" for note in notes))


def _reading_notes(answers: Mapping[str, Any] | None) -> list[str]:
    """Returns sentences on the policy's gain under each reading of answers, and whether only the form improved."""
    if not answers or not {"strict", "lenient"} <= answers.keys():
        return []
    strict, lenient = (answers[reading]["difference"] for reading in ("strict", "lenient"))
    gains = f"By the strict reading the policy gains {estimate(strict)}, by the lenient one {estimate(lenient)}."
    if strict["ci95"][0] > 0 and lenient["ci95"][0] <= 0:
        return [gains, "**Only the strict reading shows a gain: the form improved, not the answers.**"]
    return [gains]


def _check_notes(check: Mapping[str, Any]) -> list[str]:
    """Returns sentences on how well a judge orders labeled pairs, and on whether it is independent of the reward."""
    notes = []
    if check.get("unfit"):
        notes.append(f"**{escape(check['unfit'])}**")
    elif accuracy := check.get("accuracy"):
        notes.append(f"It orders {estimate(accuracy)} of {accuracy['n']} labeled pairs correctly.")
    notes += _shared_error_notes(check.get("with_reward"))
    own_pairs = check.get("own")
    if own_pairs:
        accuracy = own_pairs["accuracy"]
        notes.append(
            f"Of {accuracy['n']} labeled pairs of the policies' own outputs, it orders {estimate(accuracy)} correctly."
        )
        notes += _shared_error_notes(own_pairs.get("with_reward"))
    if check.get("same_labels"):
        notes.append(_SAME_LABELS_NOTE)
    elif "independent" in check and any((pairs or {}).get("with_reward") for pairs in (check, own_pairs)):
        notes.append(_INDEPENDENCE_NOTES[check["independent"]])
    return notes


def _shared_error_notes(errors: Mapping[str, Any] | None) -> list[str]:
    """Returns [a sentence on whether a judge shares the training reward's errors]; [] if that was not measured."""
    if not errors or not errors["where_reward_errs"]:
        return []
    correlation = f" (correlation of the errors: {estimate(errors['correlation'])})" if errors["correlation"] else ""
    return [
        f"The judge errs on {estimate(errors['judge_errs'])} of the pairs, and on "
        f"{estimate(errors['where_reward_errs'])} of those that the reward model orders wrongly{correlation}. A wrong "
        "label counts as an error of both."
    ]


def unparsed_note(judge: Mapping[str, Any]) -> str | None:
    """Returns a sentence on how many of a judge's answers could not be parsed; None if all were.

    Args:
        judge: The judge's entry in evaluation.json.
    """
    unparsed_pairs, unparsed_answers = ((judge.get(key) or {}).get("unparsed") or 0 for key in ("orders", "usage"))
    if not unparsed_pairs and not unparsed_answers:
        return None
    notes = []
    if unparsed_pairs:
        notes.append(f"{unparsed_pairs} pairs had an answer that could not be parsed, and count as ties")
    if unparsed_answers:
        notes.append(f"of all answers, {unparsed_answers} could not be parsed, and such a rating counts as 5.5")
    return f"{'; '.join(notes)}."


def _checkpoint_name(side: Mapping[str, Any]) -> Raw:
    commit = side.get("commit")
    name = split_revision(side["name"])[0] if side.get("repo") else side["name"]
    if side.get("repo") and side.get("tag"):
        name = f"{name}@{side['tag']}"
    return Raw(f"{code(name)}{f' at {code(commit[:10])}' if commit else ''}")


def add_to_card(repo: str, folder: Path, document: Mapping[str, Any], *, hub: Hub = DEFAULT_HUB) -> str:
    """Adds an evaluation to a published policy: the report to its card, and the files, in one commit on `main`.

    The report replaces that of an earlier evaluation against the same policy. The rest of the card is not changed.

    Args:
        repo: The policy's repository.
        folder: The folder of the evaluation: evaluation.json, samples.jsonl and win_rates.png.
        document: The content of its evaluation.json.
        hub: The Hub that has the policy.

    Returns:
        The id of the commit.

    Raises:
        ZooError: A file is missing, or the Hub refuses, for example because of another commit in between.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import EntryNotFoundError

    name = slug(document["against"]["name"])
    start_marker, end_marker = f"<!-- rlhf-zoo:evaluation {name} -->", f"<!-- /rlhf-zoo:evaluation {name} -->"
    api = hub.api()
    with translate_hub_errors(
        f"Cannot add the evaluation to {repo} on {hub.name}", "check the token, and run it again."
    ):
        head = api.model_info(repo).sha
        try:
            card = hub.file(repo, "README.md", revision=head).read_text(encoding="utf-8")
        except EntryNotFoundError:
            card = ""
        before, _, remainder = card.partition(start_marker)
        after = remainder.partition(end_marker)[2]
        text = f"{before.rstrip()}\n\n{start_marker}\n{report(document)}{end_marker}\n{after.lstrip()}".lstrip()
        files = {f"evaluations/{name}/{path.name}": path for path in _files_to_send(folder)}
        operations = [
            CommitOperationAdd("README.md", text.encode()),
            *(CommitOperationAdd(path_in_repo, str(path)) for path_in_repo, path in sorted(files.items())),
        ]
        message = f"Evaluation against {document['against']['name']}"
        return str(api.create_commit(repo, operations, commit_message=message, parent_commit=head).oid)


def _files_to_send(folder: Path) -> list[Path]:
    files = [folder / name for name in ("evaluation.json", "samples.jsonl", WIN_RATES_PLOT)]
    for path in files:
        if not path.is_file():
            raise ZooError(f"{path} does not exist, so the evaluation cannot be published: run it again.")
    return files

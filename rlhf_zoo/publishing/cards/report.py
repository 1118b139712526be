"""The report on an evaluation of any policy, in Markdown, and its place in the card of a published policy."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import finite
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.pull import split_revision
from ...hub.client.refusals import refusals_as
from ...modeling.prompt_keys import format_prompt_count
from .markdown import Raw, code, escape, estimate

WIN_RATES = "win_rates.png"
#: Figures of both policies: key -> label.
FIGURES = {
    "reward": "reward",
    "judge": "judge",
    "kl": "KL, nats per completion",
    "exact_kl": "exact KL, nats per completion",
    "length": "length, tokens",
    "eos_rate": "ended by itself, share",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "repetition": "repetition",
    "sft_perplexity": "perplexity under the other policy",
}


SAME_LABELS = (
    "**Same labels:** it learned from the labels that the reward model learned from. What they get wrong, both get "
    "wrong, so it acquits nobody."
)
INDEPENDENT = {
    True: "It errs no more where the reward model errs: by what was measured it is independent of it.",
    False: "**It is not independent of the reward model: it errs where that errs, so it acquits nobody.**",
    None: "Whether it is independent of the reward model, these pairs do not tell.",
}
#: What a reader should know about a judge that checks answers, whether or not it also rewarded PPO.
CHECKS_ANSWERS = (
    "It says whether an answer is right, so it may judge what it rewards: read it strictly and leniently, as a policy "
    "may learn to write answers in the form that is read."
)
READINGS = {"strict": "strictly (where it is to stand)", "lenient": "leniently (wherever it stands)"}


def slug(name: str) -> str:
    """Turns the name of a model into one for files: NAMESPACE/NAME@TAG gives NAMESPACE--NAME--TAG.

    Args:
        name: The name.

    Returns:
        The name for files.
    """
    return re.sub(r"[^\w.-]+", "--", name.strip("./")).strip("-") or "policy"


def report(document: Mapping[str, Any]) -> str:
    """Writes the report of `rlhf-zoo eval POLICY --against OTHER`: tables, and the judges in words.

    Args:
        document: The evaluation.json.

    Returns:
        Markdown.
    """
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    ours, theirs = (_named(document[side]) for side in ("policy", "against"))
    yield f"## Evaluation against {theirs}"
    yield ""
    if document["policy"].get("tag") not in (None, "main"):
        yield f"These figures are of {ours}, which need not be the checkpoint that this card describes."
        yield ""
    yield f"| held-out prompts | {theirs} | {ours} | n | difference, paired |"
    yield "|---|---|---|---|---|"
    for key, title in FIGURES.items():
        before, after = (document[side].get(key) for side in ("sft", "ppo"))
        if after is not None:
            at_zero = key in ("kl", "exact_kl") and abs(before["value"]) < 1e-3
            shown = "0: it is the reference" if at_zero else estimate(before)
            apart = document["difference"].get(key)
            yield f"| {title} | {shown} | {estimate(after)} | {after['n']} | {estimate(apart) if apart else ''} |"
    for what, before, after, apart in answer_rows(document["judges"]):
        shown = estimate(apart) if apart else ""
        yield f"| {escape(what)} | {estimate(before)} | {estimate(after)} | {after['n']} | {shown} |"
    for name, figures in document["judges"].items():
        yield f"| **win rate**, by {escape(name)} | | {estimate(figures['win_rate'])} | {figures['win_rate']['n']} | |"
    for name, figures in (document.get("votes") or {}).items():
        votes = figures.get("win_rate")
        rate = estimate(votes) if votes else escape(figures["problem"])
        yield f"| **win rate**, by votes of {escape(name)} | | {rate} | {(votes or {}).get('n', '')} | |"
    yield f"| win rate at equal length | | {estimate(document['win_rate_at_equal_length'])} | {document['n']} | |"
    control = f"| {estimate(document['control'])} | | {document['n']} | |"
    yield f"| control: the other policy over itself, other sampling seed {control}"
    yield ""
    where = f"the {escape(document['split'])} split of {code(document['data']['location'])}"
    each = document["samples_per_prompt"]
    yield (
        f"{format_prompt_count(document['prompts'], document.get('rows', document['prompts']))} prompts of {where}, "
        f"{each} completions a row, the same prompts and seeds for both, "
        f"temperature {document['temperature']:g}, at most {document['max_new_tokens']} new tokens, seed "
        f"{document['seed']}. In brackets: 95% intervals, over prompts, for a difference the same ones of "
        "both; n counts completions. A tie counts one half."
    )
    for name, figures in document["judges"].items():
        yield ""
        yield f"**Judge:** {escape(name)}. {escape(figures['description'])}{judge_notes(figures)}"
    yield ""
    yield f"Made by {code(document['command'])}."


def answer_rows(judges: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields the rows on correct answers, for the judges that check answers.

    Args:
        judges: Name -> the judge's entry in evaluation.json.

    Yields:
        (what was counted, the other policy's, the policy's, the difference).
    """
    for name, judge in judges.items():
        for reading, sides in ((judge.get("answers") if isinstance(judge, Mapping) else None) or {}).items():
            ours, theirs = sides["ppo"], sides["sft"]
            what = f"right answers by {name}, read {READINGS.get(reading, reading)}"
            yield what, theirs["accuracy"], ours["accuracy"], sides["difference"]
            most = max(map(int, ours["pass_at"]))
            for key, title in (("majority_at", "the majority of {}, right"), ("pass_at", "pass@{}")):
                if most > 1 and key in ours:
                    how = READINGS.get(reading, reading).partition(" ")[0]
                    yield (
                        f"{title.format(most)}, read {how}",
                        theirs[key][str(most)],
                        ours[key][str(most)],
                        None,
                    )


def judge_notes(found: Mapping[str, Any]) -> Raw:
    """Returns what a reader should know about a judge besides its description.

    Args:
        found: The judge's entry in evaluation.json.

    Returns:
        Sentences, each after a space.
    """
    notes = []
    if found.get("checks_answers"):
        notes.append(CHECKS_ANSWERS)
        notes += _readings(found.get("answers"))
    elif found.get("is_training_reward"):
        notes.append(
            "**This is the policy's own reward: it says that training worked, not that the policy got better.**"
        )
    notes += _checked(found.get("check") or {})
    if steady := found.get("split_half"):
        notes.append(f"Its scores of two halves of the samples have a rank correlation of {estimate(steady)}.")
    orders = found.get("orders")
    if orders and orders.get("agreement"):
        notes.append(f"Asked in both orders, which agreed in {estimate(orders['agreement'])} of the pairs.")
    if unreadable := unread(found):
        notes.append(unreadable)
    cost = (found.get("usage") or {}).get("cost")
    if finite(cost) and cost is not None:
        notes.append(f"Cost: {cost:.4g}.")
    return Raw("".join(f" {note}" for note in notes))


def _readings(answers: Mapping[str, Any] | None) -> list[str]:
    """Returns sentences on what the policy gains by each reading of an answer, and whether only its form improved."""
    if not answers or not {"strict", "lenient"} <= answers.keys():
        return []
    strict, lenient = (answers[reading]["difference"] for reading in ("strict", "lenient"))
    gains = f"Read strictly the policy gains {estimate(strict)}, and leniently {estimate(lenient)}."
    form = strict["ci95"][0] > 0 and lenient["ci95"][0] <= 0
    return [gains, "**Only the strict reading sees a gain: it is one of form.**"] if form else [gains]


def _checked(check: Mapping[str, Any]) -> list[str]:
    """Returns sentences on how a judge did on labeled pairs."""
    notes = []
    if check.get("unfit"):
        notes.append(f"**{escape(check['unfit'])}**")
    elif accuracy := check.get("accuracy"):
        notes.append(f"It prefers the better of {estimate(accuracy)} of {accuracy['n']} labeled pairs.")
    notes += _errors_beside_the_reward(check.get("with_reward"))
    if own := check.get("own"):
        accuracy = own["accuracy"]
        notes.append(
            f"Of {accuracy['n']} pairs of the policies' own outputs, which others put in order, it prefers the better "
            f"of {estimate(accuracy)}."
        )
        notes += _errors_beside_the_reward(own.get("with_reward"))
    if check.get("same_labels"):
        notes.append(SAME_LABELS)
    elif "independent" in check and any((part or {}).get("with_reward") for part in (check, own)):
        notes.append(INDEPENDENT[check["independent"]])
    return notes


def _errors_beside_the_reward(shared: Mapping[str, Any] | None) -> list[str]:
    """Returns a sentence on whether a judge is wrong where the training reward is wrong, if that was measured."""
    if not shared or not shared["where_reward_errs"]:
        return []
    together = f", a correlation of errors of {estimate(shared['correlation'])}" if shared["correlation"] else ""
    return [
        f"It errs in {estimate(shared['judge_errs'])} of them, and in {estimate(shared['where_reward_errs'])} of those "
        f"that the reward model orders wrongly{together}; a label that is wrong counts against both."
    ]


def unread(found: Mapping[str, Any]) -> str | None:
    """Returns a sentence on how many of a judge's answers could not be read.

    Args:
        found: The judge's entry in evaluation.json.

    Returns:
        The sentence; None where all could be read.
    """
    pairs, every = ((found.get(part) or {}).get("unparsed") or 0 for part in ("orders", "usage"))
    if not pairs and not every:
        return None
    note = f"{pairs} pairs had an answer that could not be read, and count as ties"
    return f"{note}; of all its answers it was {every}, and an unread rating counts as 5.5." if every else f"{note}."


def _named(one: Mapping[str, Any]) -> Raw:
    commit = one.get("commit")
    name = split_revision(one["name"])[0] if one.get("repo") else one["name"]
    if one.get("repo") and one.get("tag"):
        name = f"{name}@{one['tag']}"
    return Raw(f"{code(name)}{f' at {code(commit[:10])}' if commit else ''}")


def add_to_card(repo: str, folder: Path, document: Mapping[str, Any], *, hub: Hub = CLIENT) -> str:
    """Adds the report to the card of a published policy, together with the files of a folder, in one commit on `main`.

    It replaces what an earlier evaluation against the same policy left, and nothing else.

    Args:
        repo: The policy's repository.
        folder: The folder of the evaluation.
        document: Its evaluation.json.
        hub: The Hub.

    Returns:
        The commit.

    Raises:
        ZooError: A file is missing, or the Hub refuses, for instance because somebody else committed meanwhile.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import EntryNotFoundError

    name = slug(document["against"]["name"])
    begins, ends = f"<!-- rlhf-zoo:evaluation {name} -->", f"<!-- /rlhf-zoo:evaluation {name} -->"
    api = hub.api()
    with refusals_as(f"The evaluation cannot be added to {repo} on {hub.name}", "check the token, and run it again."):
        head = api.model_info(repo).sha
        try:
            card = hub.file(repo, "README.md", revision=head).read_text(encoding="utf-8")
        except EntryNotFoundError:
            card = ""
        before, _, rest = card.partition(begins)
        after = rest.partition(ends)[2]
        text = f"{before.rstrip()}\n\n{begins}\n{report(document)}{ends}\n{after.lstrip()}".lstrip()
        files = {f"evaluations/{name}/{path.name}": path for path in _sent(folder)}
        operations = [
            CommitOperationAdd("README.md", text.encode()),
            *(CommitOperationAdd(at, str(path)) for at, path in sorted(files.items())),
        ]
        message = f"Evaluation against {document['against']['name']}"
        return str(api.create_commit(repo, operations, commit_message=message, parent_commit=head).oid)


def _sent(folder: Path) -> list[Path]:
    files = [folder / name for name in ("evaluation.json", "samples.jsonl", WIN_RATES)]
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise ZooError(f"{missing} is not there, so the evaluation cannot be published: run it again.")
    return files

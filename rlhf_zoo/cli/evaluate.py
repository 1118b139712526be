"""`rlhf-zoo eval`: compares a recipe's PPO policy with its SFT policy, or any two policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from ..modeling.prompt_keys import format_group_count, format_prompt_count
from ..runs.settings.judge_names import check_judge_name
from ..runs.settings.values import json_object
from .common import command_line, loading, parse_columns, read_flags
from .layout import RecipeCommand
from .open_run import locked, open_hub
from .options import LM_EVAL, LM_EVAL_TASKS, json_option, run_options
from .tables import print_json, print_table, print_text
from .train import run_single_stage

if TYPE_CHECKING:
    from ..hub.client.connect import Hub

#: Option -> the key of the recipe that it sets.
KEY_OF_OPTION = {
    "prompts": "evaluation.prompts", "samples": "evaluation.samples", "group": "evaluation.group",
    "llm": "evaluation.llm",
}  # fmt: skip
#: Options that apply only to a POLICY, and options that apply only to a RECIPE.
POLICY_OPTIONS = ("against", "reward", "split", "temperature", "max_new_tokens")
RECIPE_OPTIONS = ("namespace", "private", "patience", "resume", "restart", "overwrite_repo")
#: Keys of a recipe that are options of a POLICY too.
SHARED_KEYS = ("dataset_name", "dataset_revision", "dataset_config", "columns", "seed")


@click.command("eval", cls=RecipeCommand)
@click.argument("subject", metavar="RECIPE|POLICY")
@click.option(
    "--against", help="The policy to compare with.  [default: the SFT policy that POLICY's run or card names]"
)
@click.option(
    "--judge",
    "judges",
    multiple=True,
    help="A judge; may be repeated, and the first one gives the headline win rate.  "
    "[default: the judge of the run, or classifier]",
)
@click.option("--llm", help='Settings of judges llm:MODEL, as JSON: \'{"price": [0.15, 0.6], "budget": 1}\'.')
@click.option(
    "--prompts",
    type=click.IntRange(min=1),
    help="Number of held-out prompts.  [default: 200; for a RECIPE its key evaluation.prompts]",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Number of completions of each prompt.  [default: 3; for a RECIPE its key evaluation.samples]",
)
@click.option(
    "--group",
    help="How prompts that ask the same thing are grouped: near-duplicates, a column with the group, or none.  "
    "[default: near-duplicates; for a RECIPE its key evaluation.group]",
)
@click.option(
    "--reward",
    help="The reward model; 'none' uses no reward model.  [default: the one that POLICY's run or card names]",
)
@click.option("--split", help="Split of the prompts.  [default: the split that training held out, else test]")
@click.option(
    "--temperature", type=float, help="Sampling temperature.  [default: the temperature of the policy's training]"
)
@click.option(
    "--max_new_tokens",
    "--max-new-tokens",
    type=int,
    help="Maximum number of new tokens.  [default: the number in the policy's training]",
)
@run_options
@LM_EVAL
@json_option("Print evaluation.json.")
@click.pass_context
def evaluate(
    ctx: click.Context, subject: str, judges: tuple[str, ...], llm: str | None, as_json: bool, **options: Any
) -> None:
    """Compare PPO with SFT on held-out prompts, or any policy with another.

    For a RECIPE, the PPO and SFT policies of its run are compared. A POLICY is NAMESPACE/NAME[@TAG], a model's folder,
    or a run directory of PPO. Its prompts come from the data set that its run or card names, or from --dataset_name.
    Its figures go into runs/eval or --output_dir, and with --push_to_hub also into its card.

    The judge classifier learns from labeled texts of the data set. reward:MODEL is another reward model, and
    reward:MODEL#LABEL the probability of one label of a classifier. rule:REWARD is a reward function or verifier.
    llm:MODEL asks the server at OPENAI_BASE_URL, with OPENAI_API_KEY. votes:NAMESPACE/NAME counts people's votes.
    MODULE:FUNCTION is your own function that scores texts, and pairs:MODULE:FUNCTION one that compares two.

    For a RECIPE, each key that `rlhf-zoo recipes keys recipe` lists is a flag. A POLICY takes --dataset_name,
    --dataset_revision, --dataset_config, --columns and --seed (default 1).

    \b
    Example:
      rlhf-zoo eval tiny-world --evaluation.samples 2
      rlhf-zoo eval local/tiny-sums-ppo --against local/tiny-sums-sft --hub local
    """
    for judge in judges:
        check_judge_name(judge)
    comparison = {name: options.pop(name) for name in (*POLICY_OPTIONS, "prompts", "samples", "group")}
    llm_settings = None if llm is None else json_object(llm, option="--llm", example="'{\"budget\": 1}'")
    if _is_policy(subject, against=comparison["against"]):
        _evaluate_policy(ctx, subject, judges, comparison, llm_settings, as_json, options)
        return
    wrong_option = next((name for name in POLICY_OPTIONS if comparison[name] is not None), None)
    if wrong_option is not None:
        raise ZooError(f"--{wrong_option} is for a policy, but {subject} is a recipe: leave it out, or name a policy.")
    flags = read_flags(ctx, subject, stage="eval")
    flags["recipe"] |= _recipe_keys(judges, {**comparison, "llm": llm_settings}, flags["recipe"])
    folder = run_single_stage(subject, "eval", flags, to_stderr=as_json, **options)
    if as_json:
        click.echo((folder / "evaluation.json").read_text(encoding="utf-8").rstrip())


def _evaluate_policy(
    ctx: click.Context,
    subject: str,
    judges: tuple[str, ...],
    comparison: Mapping[str, Any],
    llm_settings: Mapping[str, Any] | None,
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    """Evaluates a POLICY. `comparison` holds POLICY_OPTIONS, prompts, samples and group."""
    wrong_options = ["lm_eval"] if ctx.meta[LM_EVAL_TASKS] is not None else []
    wrong_options += [name for name in RECIPE_OPTIONS if options[name]]
    if wrong_options:
        raise ZooError(f"--{wrong_options[0]} is for a recipe's run, but {subject} is a policy: leave it out.")
    comparison = {**comparison, **_policy_flags(ctx)}
    push_to_hub = options["push_to_hub"]
    with open_hub(options["hub"], push_to_hub=push_to_hub, source=options["source_hub"]) as hub:
        if push_to_hub:
            if Path(subject).is_dir():
                raise ZooError(
                    f"{subject} is a folder, but --push_to_hub adds to the card of a published policy: name its "
                    "repository."
                )
            from ..hub.client.publish import resolve_namespace

            resolve_namespace(None, hub=hub)  # checks the token before the evaluation rather than after it
        try:
            folder, document = _compare(subject, judges, comparison, llm_settings, options["output_dir"], hub)
        except KeyboardInterrupt:
            asks_llm = any(judge.startswith("llm:") for judge in judges)
            hint = " The answers of language models are kept." if asks_llm else ""
            click.echo(f"Interrupted; no figures were written. Run the same command to start again.{hint}", err=True)
            ctx.exit(130)
        if push_to_hub:
            from ..hub.client.pull import split_revision
            from ..publishing.cards.report import add_to_card

            repo = split_revision(subject)[0]
            commit = add_to_card(repo, folder, document, hub=hub)
            click.echo(f"The evaluation is in the card of {repo} ({commit[:10]}).", err=True)
    if as_json:
        print_json(document)
        return
    _show(document)
    click.echo(f"The figures are in {folder / 'evaluation.json'}, the completions and a plot next to it.")


def _compare(
    subject: str,
    judges: tuple[str, ...],
    comparison: Mapping[str, Any],
    llm_settings: Mapping[str, Any] | None,
    output_dir: Path | None,
    hub: Hub,
) -> tuple[Path, dict[str, Any]]:
    """Compares two policies. Returns the folder of the figures, and the content of its evaluation.json."""
    with loading("loading the evaluation"):
        from ..pipeline import policy_eval
        from ..publishing.cards.report import slug
        from ..runs.settings.evaluation import llm_config
        from ..runs.settings.values import coerce

    options = {name: value for name, value in comparison.items() if value is not None}
    if "group" in options:
        options["group"] = coerce(options["group"], str | None)
    against, reward = options.pop("against", None), options.pop("reward", None)
    if judges:
        options["judges"] = judges
    settings = policy_eval.ComparisonSettings(**options, llm=llm_config(llm_settings or {}, "--llm"))
    pair = policy_eval.find_pair(subject, against=against, reward=reward, settings=settings, hub=hub)
    # `pair.policy.name` has the full tag, so POLICY@step-40 and POLICY@step-000040 share one folder.
    folder = output_dir or Path("runs") / "eval" / slug(pair.policy.name if pair.policy.repo else subject)
    if folder.exists() and not folder.is_dir():
        raise ZooError(f"{folder} is a file, so no figures can be kept in it: give another --output_dir.")
    with locked(folder):
        return folder, policy_eval.evaluate(pair, settings, out=folder, command=command_line())


def _is_policy(subject: str, *, against: str | None) -> bool:
    """Whether the argument RECIPE|POLICY names a policy: --against works for policies only."""
    if against is not None:
        return True
    path = Path(subject)
    if path.is_dir():
        return not (path / "recipe.yaml").is_file()
    return "/" in subject and not subject.startswith(("-", ".", "/"))


def _recipe_keys(judges: tuple[str, ...], options: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this command's options as keys of recipe.yaml. Raises ZooError if a flag sets one of these keys too."""
    values = {key: options[name] for name, key in KEY_OF_OPTION.items() if options[name] is not None}
    if judges:
        values |= {"evaluation.judge": judges[0], "evaluation.judges": list(judges[1:])}
        # The recipe's judge_name and judge_description describe its own judge.
        values |= {"evaluation.judge_name": None, "evaluation.judge_description": ""}
    duplicate = next((key for key in values if key in flags), None)
    if duplicate is not None:
        option = next((name for name, key in KEY_OF_OPTION.items() if key == duplicate), "judge")
        raise ZooError(f"--{option} sets {duplicate} too: leave --{option} or --{duplicate} out.")
    return values


def _policy_flags(ctx: click.Context) -> dict[str, Any]:
    """Parses the flags of a POLICY: SHARED_KEYS. Raises ZooError for another flag."""
    from ..plugins import did_you_mean
    from ..runs.settings.parse import parse_flags
    from ..runs.settings.values import coerce

    flags_by_stage = parse_flags(ctx.args)
    flags = flags_by_stage.pop("")
    unknown_flags = [name for name in flags if name not in SHARED_KEYS]
    unknown_flags += [f"{stage}.{name}" for stage, stage_flags in flags_by_stage.items() for name in stage_flags]
    if unknown_flags:
        options = [*SHARED_KEYS, *POLICY_OPTIONS, "judge", "llm", "prompts", "samples", "group"]
        hint = did_you_mean(unknown_flags[0], options) or ": `rlhf-zoo eval --help` lists the options."
        raise ZooError(f"--{unknown_flags[0]} is not an option for a policy{hint}")
    values: dict[str, Any] = {name: str(value) for name, value in flags.items() if name.startswith("dataset_")}
    if "dataset_config" in values:
        values["dataset_config"] = coerce(values["dataset_config"], str | None) or ""
    if "columns" in flags:
        values["columns"] = parse_columns(flags["columns"], example="{prompt: question}")
    try:
        return values | ({"seed": int(flags["seed"])} if "seed" in flags else {})
    except (TypeError, ValueError) as error:
        raise ZooError(f"--seed is {flags['seed']!r}: give a whole number.") from error


def _show(document: Mapping[str, Any]) -> None:
    from ..publishing.cards.markdown import estimate
    from ..publishing.cards.report import FIGURES, answer_rows, unparsed_note

    rows, differences = [], []
    for key, title in FIGURES.items():
        other, policy = (document[side].get(key) for side in ("sft", "ppo"))
        label = f"judge: {document['judge']['name']}" if key == "judge" else title
        if policy is not None:
            rows.append([label, str(estimate(other)), str(estimate(policy))])
        if key in document["difference"]:
            differences.append([label, str(estimate(document["difference"][key]))])
    for label, other, policy, difference in answer_rows(document["judges"]):
        rows.append([label, str(estimate(other)), str(estimate(policy))])
        if difference is not None:
            differences.append([label, str(estimate(difference))])
    for name, judge in document["judges"].items():
        rows.append([f"win rate, by {name}", "", str(estimate(judge["win_rate"]))])
    for name, judge in (document.get("votes") or {}).items():
        win_rate = judge["win_rate"]
        rows.append([f"win rate, by votes of {name}", "", str(estimate(win_rate)) if win_rate else "none"])
    rows.append(["win rate at equal length", "", str(estimate(document["win_rate_at_equal_length"]))])
    rows.append(["control: against itself, another seed", str(estimate(document["control"])), ""])
    prompt_count = format_prompt_count(document["prompts"], document["rows"])
    print_table(
        f"{document['policy']['name']} against {document['against']['name']}: {prompt_count} prompts"
        f"{format_group_count(document['groups'], document['prompts'])} of the {document['split']} split, "
        f"{document['samples_per_prompt']} completions each, 95% intervals",
        ["", "the other", "the policy"],
        rows,
    )
    print_table("The policy's figures minus those of the other, paired by prompt", ["", "difference"], differences)
    for judge in (document.get("votes") or {}).values():
        if judge["problem"]:
            print_text(judge["problem"], err=True)
    for name, judge in document["judges"].items():
        if unfit := (judge.get("check") or {}).get("unfit"):
            print_text(f"{name}: {unfit}", err=True)
        if note := unparsed_note(judge):
            print_text(f"{name}: {note}", err=True)
        if judge.get("is_training_reward") and not judge.get("checks_answers"):
            click.echo(
                f"{name} is the policy's own reward: it shows that training worked, not that answers got better.",
                err=True,
            )

"""`rlhf-zoo probe`: tests rollouts of any trainer for reward hacking, and gives the verdict."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import printable
from ..fileio import write_text
from ..modeling.prompt_keys import format_group_count
from .common import loading
from .layout import Command
from .open_run import open_hub
from .options import HUB, SOURCE_HUB, TRUST, UserPath, json_option
from .tables import print_json, print_table, stdout_console

if TYPE_CHECKING:
    from ..evaluation.rollouts import RolloutFindings

#: Largest number of characters of a sample in the terminal.
MAX_CHARACTERS = 160
#: The verdicts of `--fail_on`, the gravest last.
FAILURES = ("suspicious", "worse", "hacked")


@click.command(cls=Command)
@click.argument("completions", type=UserPath(exists=True, dir_okay=False))
@click.option(
    "--against",
    required=True,
    type=UserPath(exists=True, dir_okay=False),
    help="File with the SFT model's completions of the same prompts.",
)
@click.option("--model", help="The SFT model, a folder or NAMESPACE/NAME[@TAG]: two probes read its log-probabilities.")
@click.option("--device", help="Where the model runs, such as cpu or cuda:1.  [default: the accelerator, else cpu]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "auto"]),
    help="The type of the model's weights in memory.  [default: float32]",
)
@click.option("--reward", metavar="COLUMN", help="The column of the reward.  [default: reward or score]")
@click.option(
    "--verifiable",
    is_flag=True,
    help="The reward is a program that checks answers, so it may serve as its own judge.",
)
@click.option(
    "--labeled",
    metavar="PAIRS",
    type=UserPath(exists=True, dir_okay=False),
    help="File of labeled pairs of texts from elsewhere, which can show that the judge is unfit. Its columns are "
    "prompt, chosen, rejected, judge_chosen and judge_rejected.",
)
@click.option(
    "--own_pairs",
    "--own-pairs",
    metavar="PAIRS",
    type=UserPath(exists=True, dir_okay=False),
    help="File of labeled pairs of completions in the two files. Its columns are prompt, chosen and rejected. Labels "
    "for 20 prompts or more give the verdict without a judge. A judge that orders them well can show that the "
    "policy is better.",
)
@click.option(
    "--embedder",
    metavar="NAME",
    help="A sentence embedder, a folder or NAMESPACE/NAME such as sentence-transformers/all-MiniLM-L6-v2: a probe then "
    "also recognizes paraphrased answers to other prompts.",
)
@HUB
@SOURCE_HUB
@TRUST
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of permutations and intervals.")
@click.option(
    "--fail_on",
    "--fail-on",
    multiple=True,
    type=click.Choice(FAILURES),
    help="End with exit code 3 on this verdict or a graver one: suspicious, then worse, then hacked.",
)
@click.option(
    "--html", metavar="FILE", type=UserPath(dir_okay=False), help="Write the findings with samples into one HTML file."
)
@json_option()
def probe(
    completions: Path,
    against: Path,
    model: str | None,
    labeled: Path | None,
    own_pairs: Path | None,
    embedder: str | None,
    hub: str | None,
    source_hub: str | None,
    fail_on: tuple[str, ...],
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Test any trainer's completions for reward hacking, and give the verdict.

    They are compared with the SFT model's completions of the same prompts.

    COMPLETIONS is a file of JSON lines, a JSON array or Parquet, as TRL, OpenRLHF or verl write it. Its columns are
    prompt and completion (or input and output). Optional columns are reward (or score), judge, logprobs (of the tokens
    under the SFT model), and group (equal for prompts that ask the same). The samples.jsonl of an evaluation has the
    completions of both models: pass it twice.

    \b
    Example:
      rlhf-zoo probe rollouts.jsonl --against sft.jsonl --model ./sft-model
    """
    if html is not None and html.exists():
        inputs = [path for path in (completions, against, labeled, own_pairs) if path is not None]
        if any(html.samefile(path) for path in inputs):
            raise click.BadParameter(f"{html} is one of the files to read: name another file.", param_hint="--html")
    from ..evaluation.rollout_probe import probe as run_probes
    from ..hub.client.connect import DEFAULT_HUB

    with contextlib.ExitStack() as stack:
        connected_hub = DEFAULT_HUB
        if model is not None or embedder is not None:
            with loading("loading the trainer"):
                from ..pipeline.stages.train import silence_libraries

            silence_libraries()
        # A model's folder may hold an adapter, whose base model is on a Hub. An embedder is never an adapter.
        if model is not None or (embedder is not None and not Path(embedder).is_dir()):
            connected_hub = stack.enter_context(open_hub(hub, source=source_hub))
        result = run_probes(
            completions, against, model=model, labeled=labeled, own_pairs=own_pairs, embedder=embedder,
            hub=connected_hub, **options,
        )  # fmt: skip
    if html is not None:
        from ..publishing.probe_page import probe_page

        write_text(html, probe_page(result, policy=str(completions), reference=str(against)))
        click.echo(f"Report: {html}", err=True)
    if as_json:
        print_json(result.to_json())
    else:
        _print_findings(result, (completions, against), wrote_html=html is not None)
    mildest = min(map(FAILURES.index, fail_on), default=len(FAILURES))
    if result.verdict.kind in FAILURES[mildest:]:
        raise click.exceptions.Exit(3)


def _print_findings(result: RolloutFindings, files: tuple[Path, Path], *, wrote_html: bool) -> None:
    """Prints a table of the probes, the verdict with its reasons, samples, and what to do next."""
    rows = [
        [probe.family, f"{probe.ratio:.2f} × threshold", f"{probe.p:.3g}", "yes" if probe.fired else "", probe.finding]
        for probe in result.report.probes
    ]
    for family, reason in result.report.skipped.items():
        hint = ": give --model" if "needs the SFT model" in reason else ""
        rows.append([family, "", "", "", reason + hint])
    print_table("", ["family", "effect", "p", "fired", "finding"], rows)
    console = stdout_console(160)
    lines = [
        f"Verdict: {result.verdict.text}, on {_count(result.prompts, 'prompt')}"
        f"{format_group_count(result.groups, result.prompts)}.",
        *map("- {}".format, result.verdict.reasons),
    ]
    if result.warning:
        lines.append(f"- {result.warning}")
    if result.split_half is not None:
        low, high = result.split_half.ci95
        lines.append(
            f"- The judge's scores of two halves of the samples have a rank correlation of "
            f"{result.split_half.value:.2f} [{low:.2f}, {high:.2f}]; random scores would have 0."
        )
    lines += [f"- {line}" for line in _judge_lines(result)]
    if any(result.left_out):
        used_counts = (result.completions, result.reference_completions)
        rows_left_out = " and ".join(
            f"{left_out_count} of {_count(left_out_count + used_count, 'row')} of {path}"
            for left_out_count, used_count, path in zip(result.left_out, used_counts, files, strict=True)
        )
        lines.append(f"- Left out, because only one file has their prompt: {rows_left_out}.")
    families_by_sample = defaultdict[tuple[str, str], list[str]](list)
    for probe in result.report.probes:
        if probe.fired:
            for sample in probe.worst[:1]:
                families_by_sample[sample.prompt, sample.completion].append(probe.family)
    lines += [
        f"Worst sample by {', '.join(families)}: {_quoted(prompt)} → {_quoted(completion)}"
        for (prompt, completion), families in families_by_sample.items()
    ]
    if families_by_sample and not wrote_html:
        lines.append("More samples: --html FILE.")
    lines.append(f"Next: {result.next_step}")
    for line in lines:
        console.print(printable(line), highlight=False, markup=False)


def _quoted(text: str) -> str:
    """Returns a text on one line, in quotation marks and cut to MAX_CHARACTERS."""
    line = " ".join(text.split())
    return f"“{line[:MAX_CHARACTERS]} …”" if len(line) > MAX_CHARACTERS else f"“{line}”"


def _judge_lines(result: RolloutFindings) -> list[str]:
    """Returns sentences about how well the judge orders labeled pairs."""
    check = result.judge_check
    if check is None:
        return []
    lines = []
    for title, pairs in (("labeled pairs", check.labeled_check), ("own pairs", check.own_check)):
        if pairs is not None:
            accuracy, (low, high) = pairs.accuracy, pairs.accuracy.ci95
            lines.append(
                f"The judge orders {accuracy.value:.3f} [{low:.3f}, {high:.3f}] of {accuracy.n} {title} correctly."
            )
    if check.independent is not None:
        lines.append(f"The judge's errors are {'independent of' if check.independent else 'shared with'} the reward's.")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""`rlhf-zoo probe`: anybody's rollouts against the SFT model's, by the probes and the verdict's rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ZooError
from .common import SOURCE_HUB, TRUST, UserPath, console_of, print_json, settle_hub, table

if TYPE_CHECKING:
    from ..evaluation.probes import Completions


@click.command()
@click.argument("completions", type=UserPath(exists=True, dir_okay=False))
@click.option(
    "--against",
    required=True,
    type=UserPath(exists=True, dir_okay=False),
    help="Completions of the SFT model for the same prompts, as another file.",
)
@click.option("--model", help="The SFT model, a folder or NAMESPACE/NAME[@TAG]: two probes read its log-probabilities.")
@click.option("--hub", help="'local' or an address.")
@SOURCE_HUB
@TRUST
@click.option("--seed", type=int, default=1, show_default=True, help="Of permutations and intervals.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe(
    completions: Path,
    against: Path,
    model: str | None,
    hub: str | None,
    source_hub: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Probe a policy's completions for a hacked reward, beside those of its SFT model, and give the verdict.

    COMPLETIONS is a file of JSON lines with prompt and completion, as TRL, OpenRLHF or verl write them (input and
    output will do), and where there are any reward (or score), judge, and logprobs of the tokens under the SFT model.

    \b
    Example:
      rlhf-zoo probe rollouts.jsonl --against sft.jsonl --model ./sft-model
    """
    from ..evaluation.rollouts import probe_rollouts, read_rollouts

    ours, theirs = read_rollouts(completions), read_rollouts(against)
    if not set(ours.prompts) & set(theirs.prompts):
        raise ZooError(f"{completions} and {against} share no prompt: sample both for the same prompts.")
    if model is not None:
        ours, theirs = _under(model, hub, source_hub, ours, theirs, seed)
    found = probe_rollouts(ours, theirs, seed=seed)
    if as_json:
        print_json(found.to_json())
        return
    rows = [
        [one.family, f"{one.effect:.3g}", f"{one.least:.3g}", f"{one.p:.3g}", "yes" if one.present else "", one.meaning]
        for one in found.report.probes
    ]
    rows += [[family, "", "", "", "", why] for family, why in found.report.skipped.items()]
    table("", ["probe", "effect", "counts from", "p", "present", "what it says"], rows)
    console = console_of(160)
    console.print(f"Verdict: {found.verdict.text}, on {found.prompts} prompts.", highlight=False, markup=False)
    for reason in found.verdict.reasons:
        console.print(f"- {reason}", highlight=False, markup=False)


def _under(
    model: str, hub: str | None, source_hub: str | None, ours: Completions, theirs: Completions, seed: int
) -> tuple[Completions, Completions]:
    """With log-probabilities under the SFT model, and how much likelier it finds a text after its own prompt."""
    from ..evaluator.written import dependence, logprobs_under
    from ..hub.refs import resolve
    from ..model_files import load_tokenizer
    from ..models import load_causal

    with settle_hub(hub, push_to_hub=False, source=source_hub) as where:
        path = resolve(model, where).path
        sft, tokenizer = load_causal(path).eval(), load_tokenizer(path)
    found = []
    for one in (ours, theirs):
        tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in one.texts]
        rated = logprobs_under(sft, tokenizer, one.prompts, tokens)
        own = [sum(row) for row in rated]
        found.append(
            replace(one, logprobs=rated, dependence=dependence(sft, tokenizer, one.prompts, tokens, own, seed=seed))
        )
    return found[0], found[1]

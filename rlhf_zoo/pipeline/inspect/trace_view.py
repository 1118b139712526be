"""Prints a trace as a table of tokens with totals, and converts it to JSON."""

from typing import TYPE_CHECKING, Any

from ...modeling.chat import display_text
from ...ppo.trace import Trace
from ...runs.registry import REWARD_ROLES
from .trace import TracedPolicy

if TYPE_CHECKING:
    from rich.console import Console


def to_document(trace: Trace, traced: TracedPolicy) -> dict[str, Any]:
    """Returns the document for --json: prompt, completion, tokens, totals, and the checkpoints.

    Args:
        trace: The trace.
        traced: The policy that was traced.
    """
    roles = {"policy": traced.policy, "reference": traced.reference, "old": traced.old, "reward": None}
    roles |= dict(zip(REWARD_ROLES, traced.reward_models, strict=False))
    names = {role: None if checkpoint is None else checkpoint.name for role, checkpoint in roles.items()}
    return {**trace.to_json(), "models": {**names, "step": traced.step}}


def show(trace: Trace, traced: TracedPolicy, console: "Console") -> None:
    """Prints the table of tokens and the totals. Markup in texts is printed literally.

    Args:
        trace: The trace.
        traced: The policy that was traced.
        console: A rich console.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    old = traced.old.name if traced.old is not None else "the reference"
    console.print(Text(f"{traced.policy.name}{'' if traced.step is None else f', step {traced.step}'}"))
    console.print(Text(f"against {traced.reference.name} (π_ref) and {old} (π_old)"))
    console.print(Text(f"{display_text(trace.prompt)!r} → {trace.completion!r}"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("token", overflow="fold")
    for name in ("log π", "log π_ref", "KL k1", "r", "V", "δ", "Â", "ρ", "clip"):
        table.add_column(name, justify="right", no_wrap=True)
    for token in trace.tokens:
        numbers = (
            token.logprob, token.ref_logprob, token.kl, token.reward, token.value, token.delta, token.advantage,
            token.ratio,
        )  # fmt: skip
        clip = "" if token.clipped is None else "yes" if token.clipped else "no"
        # repr shows spaces, and escapes control characters.
        table.add_row(Text(repr(token.token)), *("" if number is None else f"{number:.3f}" for number in numbers), clip)
    console.print(table)
    for line in _totals(trace):
        console.print(Text(line))


def _totals(trace: Trace) -> list[str]:
    low, high = trace.cliprange
    parts = ", ".join(
        f"{name} {'does not apply' if score is None else f'{score:.3f}'}" for name, score in trace.scores.items()
    )
    kl_place = "in the reward" if trace.kl_in == "reward" else "in the loss, so r does not include it"
    action = "each token is an action" if trace.action_level == "token" else "the completion is one action"
    end = "ended by itself" if trace.ended else f"did not end within {trace.length}"
    return [
        f"score {trace.score:.3f} ({parts}), {trace.shaped_score:.3f} of it as the reward of the last token",
        f"ΣKL {trace.kl:.3f} nats, β {trace.kl_coef:g} ({trace.kl_estimator}, {kl_place})",
        f"{trace.length} tokens, {end}; temperature {trace.temperature:g}, seed {trace.seed}",
        f"∏ρ {trace.ratio:.3f}, clipped outside [{low:g}, {high:g}]; {action}; γ {trace.gamma:g}, λ {trace.lam:g}",
        *([trace.whitening] if trace.whitening else []),
    ]

"""Prints a trace as a table of tokens with totals, and converts it to JSON."""

from typing import TYPE_CHECKING, Any

from ...modeling.chat import display_text
from ...ppo.trace import Trace
from ...runs.registry import REWARD_ROLES
from .trace import TracedPolicy

if TYPE_CHECKING:
    from rich.console import Console


def to_document(trace: Trace, traced_policy: TracedPolicy) -> dict[str, Any]:
    """Returns the document for --json: prompt, completion, tokens, totals, and the checkpoints.

    Args:
        trace: The trace.
        traced_policy: The policy, and the models of its run.
    """
    checkpoints = {role: getattr(traced_policy, role) for role in ("policy", "reference", "old")}
    checkpoints |= {"reward": None, **dict(zip(REWARD_ROLES, traced_policy.reward_models, strict=False))}
    names = {role: None if checkpoint is None else checkpoint.name for role, checkpoint in checkpoints.items()}
    return {**trace.to_json(), "models": {**names, "step": traced_policy.step}}


def show(trace: Trace, traced_policy: TracedPolicy, console: "Console") -> None:
    """Prints the table of tokens and the totals. Markup in texts is printed literally.

    Args:
        trace: The trace.
        traced_policy: The policy, and the models of its run.
        console: A rich console.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    step_note = "" if traced_policy.step is None else f", step {traced_policy.step}"
    old_name = "the reference" if traced_policy.old is None else traced_policy.old.name
    console.print(Text(f"{traced_policy.name}{step_note}"))
    console.print(Text(f"against {traced_policy.reference.name} (π_ref) and {old_name} (π_old)"))
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
    for line in _total_lines(trace):
        console.print(Text(line))


def _total_lines(trace: Trace) -> list[str]:
    low, high = trace.cliprange
    rewards = ", ".join(
        f"{name} {'does not apply' if score is None else f'{score:.3f}'}" for name, score in trace.scores.items()
    )
    kl_place = "in the reward" if trace.kl_in == "reward" else "in the loss, so r does not include it"
    action = "each token is an action" if trace.action_level == "token" else "the completion is one action"
    end = "ended by itself" if trace.ended else f"did not end within {trace.length}"
    return [
        f"score {trace.score:.3f} ({rewards}), {trace.shaped_score:.3f} of it as the reward of the last token",
        f"ΣKL {trace.kl:.3f} nats, β {trace.kl_coef:g} ({trace.kl_estimator}, {kl_place})",
        f"{trace.length} tokens, {end}; temperature {trace.temperature:g}, seed {trace.seed}",
        f"∏ρ {trace.ratio:.3f}, clipped outside [{low:g}, {high:g}]; {action}; γ {trace.gamma:g}, λ {trace.lam:g}",
        *([trace.whitening] if trace.whitening else []),
    ]

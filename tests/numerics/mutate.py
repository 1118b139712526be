"""Checks that the numerics tests notice a wrong formula: breaks `functional.py` and its callers, one line at a time.

    python tests/numerics/mutate.py [test_properties.py ...]

Each mutant is in a temporary copy of the package and of the tests; the working tree is never changed. Prints a table
and exits 1 if a mutant survives, if a mutation no longer fits the source, or if the tests fail without a mutation.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORMULAS = "rlhf_zoo/functional.py"
TRAINER = "rlhf_zoo/ppo/trainer.py"
TESTS = ["test_goldens.py", "test_reference.py", "test_kl_estimators.py", "test_properties.py"]
# These catch mutants outside the formulas. They train, which is too slow for the mutants of the formulas.
TRAINER_TESTS = ["test_details.py"]
HELPERS = ["reference.py", "tolerances.py", "../trainer_fixture.py"]


@dataclass(frozen=True)
class Mutation:
    """A replacement of one piece of text in a function or method."""

    function: str
    label: str
    before: str
    after: str
    module: str = FORMULAS

    def apply(self, source: str) -> str:
        """Returns the mutated source. Raises ValueError unless `before` occurs exactly once in the function."""
        start = next((at for d in ("\ndef ", "\n    def ") if (at := source.find(f"{d}{self.function}(")) >= 0), -1)
        ends = [at for d in ("\ndef ", "\n    def ") if (at := source.find(d, start + 1)) >= 0]
        end = min(ends, default=-1)
        body = source[start : end if end > 0 else len(source)]
        if start < 0 or body.count(self.before) != 1:
            raise ValueError(f"mutation {self.label!r} does not fit {self.function}: bring it up to date")
        return source.replace(body, body.replace(self.before, self.after))


MUTATIONS = [
    Mutation("selected_logprobs", "sign of the normalizer", "token_logits - logits", "token_logits + logits"),
    Mutation("log_softmax", "sign of the normalizer", "logits - logits", "logits + logits"),
    Mutation("entropy", "sign", "return -(", "return ("),
    Mutation("masked_mean", "divides by all positions", "/ mask.sum()", "/ mask.numel()"),
    Mutation("masked_moments", "padding counted in the sums", "x.masked_fill(~mask, 0).double()", "x.double()"),
    Mutation("mean_and_std", "biased variance", "(n - 1)", "n"),
    Mutation("mean_and_std", "variance instead of σ", ".clamp(min=0).sqrt()", ".clamp(min=0)"),
    Mutation("mean_and_std", "rounding below 0 kept", ".clamp(min=0).sqrt()", ".sqrt()"),
    Mutation("mean_and_std", "a single number divided by 0", "(n - 1).clamp(min=1)", "(n - 1)"),
    Mutation("whiten", "√σ instead of σ", "std.square() + eps", "std + eps"),
    Mutation("whiten", "padding left in", "return whitened.masked_fill(~mask, 0)", "return whitened"),
    Mutation("whiten", "shift_mean inverted", "if not shift_mean", "if shift_mean"),
    Mutation("kl_penalty", "k1 reversed", "logprobs - ref_logprobs", "ref_logprobs - logprobs"),
    Mutation("kl_penalty", "k3 reversed", "torch.expm1(-k1) + k1", "torch.expm1(k1) - k1"),
    Mutation("kl_penalty", "k2 without its half", "0.5 * k1.square()", "k1.square()"),
    Mutation("kl_penalty", "k2 not squared", "0.5 * k1.square()", "0.5 * k1.abs()"),
    Mutation("exact_kl", "averaged under the reference", "(logps.exp()", "(ref_logps.exp()"),
    Mutation("exact_kl", "reversed", "logps - ref_logps", "ref_logps - logps"),
    Mutation("exact_kl", "reference not normalized", "log_softmax(ref_logits)", "ref_logits"),
    Mutation("kl_loss", "ratio inverted", "logprobs - old_logprobs", "old_logprobs - logprobs"),
    Mutation("kl_loss", "ratios overflow", ".clamp(max=MAX_LOG_RATIO)", ""),
    Mutation("kl_loss", "ratios bounded early", "clamp(max=MAX_LOG_RATIO)", "clamp(max=5.0)"),
    Mutation("kl_loss", "k2 without the ratio", '"k2":\n        return ratio.detach() * ', '"k2":\n        return '),
    Mutation("kl_loss", "k2's gradient through ρ", '"k2":\n        return ratio.detach()',
             '"k2":\n        return ratio'),
    Mutation("kl_loss", "k3's ρ held constant", "return ratio * ", "return ratio.detach() * "),
    Mutation("kl_loss", "k3_reverse is k3", '"k3_reverse":\n        return ratio.detach()',
             '"k3_reverse":\n        return ratio'),
    Mutation("sum_per_action", "levels swapped", 'level == "token"', 'level != "token"'),
    Mutation("sum_per_action", "padding counted", "x.masked_fill(~mask, 0).sum", "x.sum"),
    Mutation("sum_per_action", "mean instead of sum", ".sum(1, keepdim=True)", ".mean(1, keepdim=True)"),
    Mutation("last_token", "one position late", "mask.sum(-1) - 1", "mask.sum(-1).clamp(max=mask.shape[1] - 1)"),
    Mutation("ensemble_scores", "best instead of worst", "scores.amin(0)", "scores.amax(0)"),
    Mutation("ensemble_scores", "worst over completions", "scores.amin(0)", "scores.amin()"),
    Mutation("ensemble_scores", "sum instead of mean", 'return scores.mean(0)\n', 'return scores.sum(0)\n'),
    Mutation("ensemble_scores", "unbiased variance", "correction=0", "correction=1"),
    Mutation("ensemble_scores", "σ instead of variance", "scores.var(0, correction=0)", "scores.std(0, correction=0)"),
    Mutation("ensemble_scores", "disagreement is rewarded", "- penalty *", "+ penalty *"),
    Mutation("ensemble_scores", "no penalty", "penalty * scores", "scores"),
    Mutation("shape_scores", "clipped from above only", ".clamp(-clip, clip)", ".clamp(max=clip)"),
    Mutation("shape_scores", "multiplied by σ", "/ std", "* std"),
    Mutation("shape_scores", "not centered", "(scores - mean)", "scores"),
    Mutation("shape_scores", "clipped before scaling", "shaped_scores.clamp(-clip, clip)",
             "(scores.clamp(-clip, clip) - mean) / std"),
    Mutation("shape_scores", "bound in units of scores", "clamp(-clip, clip)", "clamp(-clip / std, clip / std)"),
    Mutation("missing_eos_penalty", "applied to ended completions", "where(ended", "where(~ended"),
    Mutation("missing_eos_score", "applied to ended completions", "where(ended", "where(~ended"),
    Mutation("missing_eos_score", "added, not replaced", "torch.full_like(scores, score)", "scores + score"),
    Mutation("missing_eos_score", "0 treated as None", "if score is None", "if not score"),
    Mutation("terminal_remainder", "paid twice", "scores - token_scores", "scores + 0 * token_scores"),
    Mutation("terminal_remainder", "padding counted", "token_scores.masked_fill(~mask, 0)", "token_scores"),
    Mutation("zero_variance_groups", "one equal pair suffices", ".all(1)", "[:, 1:].any(1)"),
    Mutation("leave_one_out", "its own score in the baseline", "/ (size - 1)", "/ size"),
    Mutation("leave_one_out", "baseline added", "(groups - baseline)", "(groups + baseline)"),
    Mutation("token_rewards", "KL is rewarded", "-kl_coef * ", "kl_coef * "),
    Mutation("token_rewards", "KL of padding counted", "kl.masked_fill(~mask, 0)", "kl"),
    Mutation("gae", "sign of the next value", "+ gamma * next_value", "- gamma * next_value"),
    Mutation("gae", "values of padding read", "values.masked_fill(~mask, 0)", "values"),
    Mutation("gae", "λ dropped", "gamma * lam * advantage", "gamma * advantage"),
    Mutation("clipped_policy_loss", "better instead of worse", "torch.maximum", "torch.minimum"),
    Mutation("clipped_policy_loss", "ratio inverted", "logprobs - old_logprobs", "old_logprobs - logprobs"),
    Mutation("clipped_policy_loss", "ties count as clipped", "clipped_loss > unclipped_loss",
             "clipped_loss >= unclipped_loss"),
    Mutation("clipped_policy_loss", "upper bound ignored", "cliprange if cliprange_high is None else cliprange_high",
             "cliprange"),
    Mutation("clipped_policy_loss", "upper bound on both sides", "clamp(1 - cliprange,", "clamp(1 - high,"),
    Mutation("clipped_policy_loss", "dual clip on gains", "advantages < 0", "advantages > 0"),
    Mutation("clipped_policy_loss", "dual clip on all", "(advantages < 0) & ", ""),
    Mutation("clipped_policy_loss", "sign of dual clip", "-dual_clip", "dual_clip"),
    Mutation("clipped_policy_loss", "dual clip not counted", "is_clipped | exceeds_ceiling", "is_clipped"),
    Mutation("clipped_policy_loss", "dual clip passes gradients", "torch.where(exceeds_ceiling, ceiling, loss)",
             "torch.where(exceeds_ceiling, ceiling + loss - loss.detach(), loss)"),
    Mutation("clipped_value_loss", "better instead of worse", "torch.maximum", "torch.minimum"),
    Mutation("clipped_value_loss", "range on one side only", "old_values - cliprange", "old_values + cliprange"),
    Mutation("aggregate", "padding counted", "loss.masked_fill(~mask, 0)", "loss"),
    Mutation("aggregate", "token mean per sequence", "masked_loss.sum() / token_count",
             "masked_loss.sum() / sequence_count"),
    Mutation("aggregate", "row's mean over its width", "/ mask.sum(1)", "/ mask.shape[1]"),
    Mutation("aggregate", "mean over rows present", "clamp(min=1)).sum() / sequence_count", "clamp(min=1)).mean()"),
    Mutation("aggregate", "token sum per token",
             '"seq-mean-token-sum":\n        return masked_loss.sum() / sequence_count',
             '"seq-mean-token-sum":\n        return masked_loss.sum() / token_count'),
    Mutation("aggregate", "no constant divisor", "(sequence_count * max_length)", "sequence_count"),
    Mutation("aggregate", "width instead of length", "* max_length)", "* mask.shape[1])"),
    Mutation("explained_variance", "sign of the residual", "1 - error", "1 + error"),
    Mutation("explained_variance", "sum instead of difference", "returns - values", "returns + values"),
    Mutation("value_r2", "offset ignored", "error.square().mean()", "error.var(correction=0)"),
    Mutation("value_r2", "unbiased variance", "correction=0", "correction=1"),
    Mutation("value_r2", "sign of the error", "1 - error", "1 + error"),
    Mutation("value_r2", "sum instead of difference", "returns - values", "returns + values"),
    Mutation("importance_weights", "inverted", "logprobs - engine_logprobs", "engine_logprobs - logprobs"),
    Mutation("importance_weights", "no cap", ".clamp(max=cap)", ""),
    Mutation("importance_weights", "floor instead of cap", "clamp(max=cap)", "clamp(min=cap)"),
    Mutation("importance_weights", "token level only", "level=level", 'level="token"'),
    Mutation("positions_of", "positions count padding", "mask.long().cumsum(-1)",
             "torch.ones_like(mask).long().cumsum(-1)", "rlhf_zoo/modeling/sampling/decoder.py"),
    Mutation("loss", "reference at temperature 1", "temperature=args.temperature", "temperature=1.0", TRAINER),
    Mutation("ppo_update", "β counts prompts", "int(moments[0])", "int(moments[0]) // self.args.num_generations",
             TRAINER),
    Mutation("of", "width instead of length", "max_actions=max_actions", "max_actions=advantages.mask.shape[1]",
             "rlhf_zoo/ppo/minibatch.py"),
    Mutation("run_epochs", "one shuffle for all epochs", "generator=shuffle",
             "generator=torch.Generator().manual_seed(shuffle.initial_seed())", TRAINER),
    Mutation("shape_reward_scores", "penalty clipped",
             "return F.missing_eos_score(scores, ended, score=args.missing_eos_score)",
             "scores = F.missing_eos_score(scores, ended, score=args.missing_eos_score)\n"
             "    return scores if args.score_clip is None else scores.clamp(-args.score_clip, args.score_clip)",
             "rlhf_zoo/ppo/rollout.py"),
]  # fmt: skip


def source_of(mutation: Mutation) -> str:
    return (ROOT / mutation.module).read_text(encoding="utf-8")


def copy_sources(target: Path) -> None:
    """Copies the package and the numerics tests, so that tests in `target` import only these copies."""
    shutil.copytree(ROOT / "rlhf_zoo", target / "rlhf_zoo", ignore=shutil.ignore_patterns("__pycache__"))
    numerics = target / "tests" / "numerics"
    numerics.mkdir(parents=True)
    for name in [*TESTS, *TRAINER_TESTS, *HELPERS]:
        shutil.copy(Path(__file__).parent / name, numerics)


def find_survivors(tests: Sequence[str] = TESTS) -> list[Mutation]:
    """Runs every mutant, prints the table, and returns those that none of the test files caught.

    The tests run in forks of this process, which has imported the libraries but not the package.

    tests: The test files for mutants of the formulas.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from mutants import first_failing_test

    for library in ("datasets", "hypothesis.extra.numpy", "pytest", "torch", "transformers.trainer"):
        __import__(library)
    mutants = [(mutation, source, mutation.apply(source)) for mutation in MUTATIONS for source in [source_of(mutation)]]
    surviving = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        copy_sources(directory)

        def failure(tests: Sequence[str]) -> str | None:
            return first_failing_test(directory, [f"numerics/{test}" for test in tests])

        if failed := failure([*tests, *TRAINER_TESTS]):
            raise RuntimeError(f"the tests fail without any mutation: {failed}")
        # Python detects stale bytecode only by size and second, so mutated modules, compiled by that run, lose theirs.
        sys.dont_write_bytecode = True
        for module in {mutation.module for mutation in MUTATIONS}:
            for compiled in (directory / module).parent.glob(f"__pycache__/{Path(module).stem}.*"):
                compiled.unlink()
        print(f"{'function':<20} {'mutation':<28} caught by")
        for mutation, source, text in mutants:
            (directory / mutation.module).write_text(text, encoding="utf-8")
            failed = failure(tests if mutation.module == FORMULAS else TRAINER_TESTS)
            (directory / mutation.module).write_text(source, encoding="utf-8")
            print(f"{mutation.function:<20} {mutation.label:<28} {failed or 'SURVIVED'}", flush=True)
            if failed is None:
                surviving.append(mutation)
    print(f"{len(mutants) - len(surviving)} of {len(mutants)} mutants caught")
    return surviving


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(1 if find_survivors(sys.argv[1:] or TESTS) else 0)

"""Would the numerics tests notice a wrong formula? Breaks `functional.py` one line at a time and runs them.

    python tests/numerics/mutate.py [test_properties.py ...]

Each mutant lives in a temporary copy of the package and of the tests; the working tree is never touched. Prints a table
and exits 1 if a mutant survives, if a mutation no longer fits the source, or if the tests fail without one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = Path("rlhf_zoo/functional.py")
TESTS = ["test_goldens.py", "test_properties.py", "test_reference.py"]


@dataclass(frozen=True)
class Mutation:
    """One line of one function, replaced."""

    function: str
    what: str
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The mutated source. Raises ValueError unless `before` occurs exactly once in the function."""
        start = source.find(f"\ndef {self.function}(")
        end = source.find("\ndef ", start + 1)
        body = source[start : end if end > 0 else len(source)]
        if start < 0 or body.count(self.before) != 1:
            raise ValueError(f"mutation {self.what!r} does not fit {self.function}: bring it up to date")
        return source.replace(body, body.replace(self.before, self.after))


MUTATIONS = [
    Mutation("selected_logprobs", "sign of the normaliser", "chosen - logits", "chosen + logits"),
    Mutation("entropy", "sign", "return -(", "return ("),
    Mutation("masked_mean", "divides by all positions", "/ mask.sum()", "/ mask.numel()"),
    Mutation("masked_moments", "padding counted in the sums", "x.masked_fill(~mask, 0).double()", "x.double()"),
    Mutation("whiten", "biased variance", "(n - 1)", "n"),
    Mutation("whiten", "padding left in", "return out.masked_fill(~mask, 0)", "return out"),
    Mutation("whiten", "shift_mean inverted", "if not shift_mean", "if shift_mean"),
    Mutation("kl_penalty", "k1 the other way round", "logprobs - ref_logprobs", "ref_logprobs - logprobs"),
    Mutation("kl_penalty", "k3 the other way round", "torch.expm1(-k1) + k1", "torch.expm1(k1) - k1"),
    Mutation("last_token", "one position late", "mask.sum(-1) - 1", "mask.sum(-1).clamp(max=mask.shape[1] - 1)"),
    Mutation("shape_scores", "clipped from above only", ".clamp(-clip, clip)", ".clamp(max=clip)"),
    Mutation("missing_eos_penalty", "falls on the ended", "where(ended", "where(~ended"),
    Mutation("token_rewards", "KL is rewarded", "-kl_coef * ", "kl_coef * "),
    Mutation("token_rewards", "KL of padding counted", "kl.masked_fill(~mask, 0)", "kl"),
    Mutation("gae", "sign of the next value", "+ gamma * next_value", "- gamma * next_value"),
    Mutation("gae", "values of padding read", "values.masked_fill(~mask, 0)", "values"),
    Mutation("gae", "λ dropped", "gamma * lam * following", "gamma * following"),
    Mutation("clipped_policy_loss", "the better of the two", "torch.maximum", "torch.minimum"),
    Mutation("clipped_policy_loss", "ratio upside down", "logprobs - old_logprobs", "old_logprobs - logprobs"),
    Mutation("clipped_policy_loss", "ties count as clipped", "clipped > plain", "clipped >= plain"),
    Mutation("clipped_value_loss", "the better of the two", "torch.maximum", "torch.minimum"),
    Mutation("clipped_value_loss", "range on one side only", "old_values - cliprange", "old_values + cliprange"),
    Mutation("aggregate", "padding counted", "loss.masked_fill(~mask, 0)", "loss"),
    Mutation("approx_kl", "the other direction", "logprobs - old_logprobs", "old_logprobs - logprobs"),
    Mutation("explained_variance", "sign of the residual", "1 - error", "1 + error"),
    Mutation("explained_variance", "sum instead of difference", "returns - values", "returns + values"),
]  # fmt: skip


def copy_tree(target: Path) -> None:
    """The package and the numerics tests, so that no other copy of either is importable from `target`."""
    shutil.copytree(ROOT / "rlhf_zoo", target / "rlhf_zoo", ignore=shutil.ignore_patterns("__pycache__"))
    here = target / "numerics"
    here.mkdir()
    for name in [*TESTS, "reference.py", "tolerances.py"]:
        shutil.copy(Path(__file__).parent / name, here)


def first_failure(directory: Path, tests: Sequence[str]) -> str | None:
    """Runs `tests` on the package in `directory`: the first that fails, or None. Raises RuntimeError if they break."""
    environment = {**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(directory), *(f"numerics/{name}" for name in tests)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED numerics/(\S+)", done.stdout, flags=re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode} and no failed test:\n{done.stdout}{done.stderr}")
    return failed.group(1)


def survivors(tests: Sequence[str] = TESTS) -> list[Mutation]:
    """Runs every mutant, prints the table, and returns those that none of the test files caught."""
    source = (ROOT / MODULE).read_text(encoding="utf-8")
    mutants = [(mutation, mutation.apply(source)) for mutation in MUTATIONS]
    alive = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        copy_tree(directory)
        if failure := first_failure(directory, tests):
            raise RuntimeError(f"the tests fail without any mutation: {failure}")
        print(f"{'function':<20} {'mutation':<28} caught by")
        for mutation, text in mutants:
            (directory / MODULE).write_text(text, encoding="utf-8")
            failure = first_failure(directory, tests)
            print(f"{mutation.function:<20} {mutation.what:<28} {failure or 'SURVIVED'}", flush=True)
            if failure is None:
                alive.append(mutation)
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants caught")
    return alive


if __name__ == "__main__":
    sys.exit(1 if survivors(sys.argv[1:] or TESTS) else 0)

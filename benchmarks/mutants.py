"""Counts how many random mutants of critical modules the tests catch: `python benchmarks/mutants.py --json FILE`.

cosmic-ray proposes the mutations (`pip install cosmic-ray==8.7.0`), and a seed draws the sample. The tests of its
module run on each mutant, the fastest first, until one fails. A second call resumes from the JSON file; if the file is
complete or has other mutants, the run starts over.
"""

import argparse
import ast
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SENDER = ["unit/test_outbox.py", "unit/test_publish.py", "unit/test_release_rule.py", "contract/test_claims.py",
          "e2e/test_faults.py"]  # fmt: skip
TRAINER = ["unit/test_trainer.py", "unit/test_ppo_options.py", "numerics/test_details.py", "unit/test_guards.py",
           "numerics/test_trl_parity.py", "unit/test_trl_defects.py", "unit/test_own_loop.py",
           "unit/test_nonfinite_steps.py", "unit/test_samples_shown.py", "unit/test_critic.py",
           "unit/test_cuda_graphs.py", "unit/test_phases.py",
           "unit/test_reward_forms.py", "numerics/test_resume.py", "numerics/test_processes.py",
           "numerics/test_learning.py"]  # fmt: skip
TESTS = {
    "ppo/trainer.py": TRAINER,
    "modeling/sampling/sampler.py": ["unit/test_sampling.py", "unit/test_sampling_queue.py", "unit/test_rewards.py",
                    "unit/test_architectures.py", "unit/test_trace.py", *TRAINER, "unit/test_comparison_stream.py"],
    "evaluation/stats.py": ["unit/test_stats.py", "unit/test_pairwise.py", "unit/test_votes.py", "unit/test_verdict.py",
                            "unit/test_frontier.py", "contract/test_metrics.py"],
    "evaluation/verdict.py": ["unit/test_verdict.py"],
    "runs/record.py": ["unit/test_record.py", "unit/test_checkpoint_integrity.py", "unit/test_checkpoint_choice.py",
                  "unit/test_card.py", "unit/test_publish.py", "contract/test_pull.py"],
    "hub/client/publish.py": [*SENDER[1:4], "contract/test_pull.py", "unit/test_checkpoint_integrity.py", *SENDER[4:]],
    "publishing/sender.py": SENDER,
    "publishing/outbox.py": SENDER,
}  # fmt: skip
TIMEOUT = 600  # seconds of a test file
FOLDER = ROOT  # each worker sets this to its own copy of the repository
#: Unions only occur in annotations, where a mutation has no effect or breaks the import.
EXCLUDED_OPERATORS = ("core/ReplaceBinaryOperator_BitOr_",)


def sample_mutants(count: int, seed: int) -> list[dict[str, Any]]:
    """Draws a random sample of places in the modules, and for each a random mutation that fits it."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    places: dict[tuple[str, str, Any], list[dict[str, Any]]] = {}
    for module in TESTS:
        nodes = list(ast_nodes(get_ast_from_path(ROOT / "rlhf_zoo" / module)))
        for name in operator_names():
            kind = get_operator(name)
            if kind.arguments() or name.startswith(EXCLUDED_OPERATORS):
                continue
            positions = [start for node in nodes for start, _ in kind().mutation_positions(node)]
            for occurrence, start in enumerate(positions):
                mutant = {"module": module, "operator": name, "occurrence": occurrence, "line": start[0]}
                places.setdefault((module, name.split("_")[0], start), []).append(mutant)
    rng = random.Random(seed)
    drawn = (rng.choice(places[place]) for place in rng.sample(list(places), len(places)))
    return list(itertools.islice(filter(mutated_source, drawn), count))


def mutated_source(mutant: dict[str, Any]) -> str | None:
    """Returns the module's source with the mutation; None if that is a syntax error, as for `*` before parameters."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    before = (ROOT / "rlhf_zoo" / mutant["module"]).read_text(encoding="utf-8")
    after = mutate_code(before, get_operator(mutant["operator"])(), mutant["occurrence"])
    try:
        is_changed = ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    except SyntaxError:
        return None
    if not is_changed:
        raise RuntimeError(f"{mutant} changes nothing")
    return str(after)


def first_failing_test(folder: Path, tests: list[str]) -> str | None:
    """Returns the first test file that fails on the package in `folder`. Tests run in forks, which import faster."""
    for name in tests:
        if not (folder / "tests" / name).is_file():
            continue
        child = os.fork()
        if not child:
            _run_pytest_and_exit(folder, name)
        deadline = time.monotonic() + TIMEOUT
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"{name} (more than {TIMEOUT} s)"
            time.sleep(0.05)
        if done[1]:
            return name
    return None


def _run_pytest_and_exit(folder: Path, name: str) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        with open(os.devnull, "r+b") as null:
            for descriptor in (0, 1, 2):
                os.dup2(null.fileno(), descriptor)
        sys.path[:0] = [str(folder)]
        os.environ |= {"PYTHONPATH": str(folder), "TMPDIR": tempfile.mkdtemp(dir=folder)}
        tempfile.tempdir = None
        import pytest

        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not full and not gpu"]
        code = int(pytest.main([*options, f"tests/{name}"]))
    finally:
        os._exit(code)


def _ignored_names(folder: str, _: list[str]) -> list[str]:
    """Names not to copy. `runs` is only ignored in the root, as the package has a folder of that name."""
    return ["__pycache__", *([".git", ".venv", "runs"] if Path(folder) == ROOT else [])]


def _take_folder(folders: Any) -> None:
    global FOLDER
    FOLDER = folders.get()


def fails_without_mutation(name: str) -> str | None:
    """Returns the test file if it fails on the original package, as it would then catch every mutant."""
    return first_failing_test(FOLDER, [name])


def try_mutant(mutant: dict[str, Any]) -> dict[str, Any]:
    """Returns the mutant with the test file that caught it, or None."""
    path = FOLDER / "rlhf_zoo" / mutant["module"]
    original = path.read_text(encoding="utf-8")
    try:
        path.write_text(str(mutated_source(mutant)), encoding="utf-8")
        return mutant | {"caught_by": first_failing_test(FOLDER, TESTS[mutant["module"]])}
    finally:
        path.write_text(original, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sample = sample_mutants(arguments.count, arguments.seed)
    for library in ("datasets", "peft", "pytest", "sklearn.linear_model", "torch", "transformers.trainer", "trl"):
        __import__(library)
    results: list[dict[str, Any]] = []
    if arguments.json.is_file():
        results = json.loads(arguments.json.read_text())["mutants"]
    if len(results) == len(sample) or any(
        not mutant.items() <= result.items() for mutant, result in zip(sample, results, strict=False)
    ):
        results = []
    remaining = sample[len(results) :]
    context = multiprocessing.get_context("fork")
    folders = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(os.cpu_count() or 1):
            folder = Path(scratch, str(number))
            shutil.copytree(ROOT, folder, ignore=_ignored_names)
            folders.put(folder)
        # Workers of multiprocessing.Pool are daemonic and may not start processes, as some tests do.
        pool = ProcessPoolExecutor(os.cpu_count(), context, _take_folder, (folders,))
        if failing := list(
            filter(None, pool.map(fails_without_mutation, dict.fromkeys(itertools.chain(*TESTS.values()))))
        ):
            raise SystemExit(f"{', '.join(failing)}: fails without a mutation, so mend it first.")
        for result in pool.map(try_mutant, remaining):
            results.append(result)
            print(f"{len(results):4} {result['module']}:{result['line']} {result['operator']}: {result['caught_by']}")
            total = Counter(row["module"] for row in results)
            caught = Counter(row["module"] for row in results if row["caught_by"])
            score = {module: f"{caught[module]}/{total[module]}" for module in TESTS}
            document = {"seed": arguments.seed, "caught": caught.total(), "of": total.total(), "by_module": score}
            arguments.json.write_text(json.dumps(document | {"mutants": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How many random mutants of what must not be wrong are caught: `python benchmarks/mutants.py --json FILE`.

cosmic-ray proposes the mutations (`pip install cosmic-ray==8.7.0`) and a seed draws the sample. Each mutant meets the
tests of its module, the quickest first, until one fails. Results go to a JSON that a second call goes on
from, unless it is whole or of other mutants.
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
SECONDS = 600
FOLDER = ROOT  # a worker has a copy of its own
#: Of no use: unions stand in annotations alone, where a mutation at most ends the import.
LEFT_OUT = ("core/ReplaceBinaryOperator_BitOr_",)


def mutants(count: int, seed: int) -> list[dict[str, Any]]:
    """A random sample of the places in all modules, each mutated in one of the ways that fit it."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    places: dict[tuple[str, str, Any], list[dict[str, Any]]] = {}
    for module in TESTS:
        nodes = list(ast_nodes(get_ast_from_path(ROOT / "rlhf_zoo" / module)))
        for name in operator_names():
            kind = get_operator(name)
            if kind.arguments() or name.startswith(LEFT_OUT):
                continue
            positions = [start for node in nodes for start, _ in kind().mutation_positions(node)]
            for number, start in enumerate(positions):
                mutant = {"module": module, "operator": name, "occurrence": number, "line": start[0]}
                places.setdefault((module, name.split("_")[0], start), []).append(mutant)
    draw = random.Random(seed)
    drawn = (draw.choice(places[place]) for place in draw.sample(list(places), len(places)))
    return list(itertools.islice(filter(mutated, drawn), count))


def mutated(mutant: dict[str, Any]) -> str | None:
    """The module's text with the mutation; None where that is no program (`*` before parameters is no product)."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    before = (ROOT / "rlhf_zoo" / mutant["module"]).read_text(encoding="utf-8")
    after = mutate_code(before, get_operator(mutant["operator"])(), mutant["occurrence"])
    try:
        changed = ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    except SyntaxError:
        return None
    if not changed:
        raise RuntimeError(f"{mutant} changes nothing")
    return str(after)


def caught_by(folder: Path, tests: list[str]) -> str | None:
    """The first test file that fails on the package in `folder`. In a fork: the libraries are imported already."""
    for name in tests:
        if not (folder / "tests" / name).is_file():
            continue
        child = os.fork()
        if not child:
            _pytest(folder, name)
        deadline = time.monotonic() + SECONDS
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"{name} (more than {SECONDS} s)"
            time.sleep(0.05)
        if done[1]:
            return name
    return None


def _pytest(folder: Path, name: str) -> None:
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


def _unneeded(folder: str, _: list[str]) -> list[str]:
    """Of the root alone: the package has a folder of the name runs, too."""
    return ["__pycache__", *([".git", ".venv", "runs"] if Path(folder) == ROOT else [])]


def _take(folders: Any) -> None:
    global FOLDER
    FOLDER = folders.get()


def fails_anyway(name: str) -> str | None:
    """The test file, where it fails on the package as it is: it would catch every mutant."""
    return caught_by(FOLDER, [name])


def meet(mutant: dict[str, Any]) -> dict[str, Any]:
    """The mutant, and the test file that caught it."""
    path = FOLDER / "rlhf_zoo" / mutant["module"]
    original = path.read_text(encoding="utf-8")
    try:
        path.write_text(str(mutated(mutant)), encoding="utf-8")
        return mutant | {"caught_by": caught_by(FOLDER, TESTS[mutant["module"]])}
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
    sample = mutants(arguments.count, arguments.seed)
    for library in ("datasets", "peft", "pytest", "sklearn.linear_model", "torch", "transformers.trainer", "trl"):
        __import__(library)
    results: list[dict[str, Any]] = []
    if arguments.json.is_file():
        results = json.loads(arguments.json.read_text())["mutants"]
    if len(results) == len(sample) or any(
        not one.items() <= met.items() for one, met in zip(sample, results, strict=False)
    ):
        results = []
    left = sample[len(results) :]
    context = multiprocessing.get_context("fork")
    folders = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(os.cpu_count() or 1):
            folder = Path(scratch, str(number))
            shutil.copytree(ROOT, folder, ignore=_unneeded)
            folders.put(folder)
        # Workers of multiprocessing.Pool may have no children of that module, which tests start.
        pool = ProcessPoolExecutor(os.cpu_count(), context, _take, (folders,))
        if failing := list(filter(None, pool.map(fails_anyway, dict.fromkeys(itertools.chain(*TESTS.values()))))):
            raise SystemExit(f"{', '.join(failing)}: fails without a mutation, so mend it first.")
        for result in pool.map(meet, left):
            results.append(result)
            print(f"{len(results):4} {result['module']}:{result['line']} {result['operator']}: {result['caught_by']}")
            of = Counter(one["module"] for one in results)
            caught = Counter(one["module"] for one in results if one["caught_by"])
            score = {module: f"{caught[module]}/{of[module]}" for module in TESTS}
            document = {"seed": arguments.seed, "caught": caught.total(), "of": of.total(), "by_module": score}
            arguments.json.write_text(json.dumps(document | {"mutants": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

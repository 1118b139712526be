"""tiny-sums over seeds: SFT, PPO and what could be had for less, on 1,000 unseen sums and on longer ones; and two twins
of the recipe whose rewards are hacked."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import keep
from figures.experiments import RUNS, shown

from rlhf_zoo.corpora.tiny_sums import MARKER, shows_work
from rlhf_zoo.evaluation.stats import share
from rlhf_zoo.model_files import load_tokenizer
from rlhf_zoo.models import load_causal
from rlhf_zoo.record import StageRecord, read_json, write_json, write_text
from rlhf_zoo.rewards.verifiable import ExactMatch
from rlhf_zoo.runs.generate import complete
from rlhf_zoo.studies.baseline import read_lines

RECIPE = "tiny-sums"
SEEDS = (1, 2, 3, 4, 5)
TWIN_SEEDS = (1, 2, 3)
CHECKS = 7680  # completions of PPO that are checked, and so many of rejection fine-tuning
SAMPLES = 16
STREAM = 23
NEW_TOKENS = 80
GREEDY = 1e-9  # of the probability: the likeliest token alone
LONGER = ("--max_steps", "1400")  # twice the recipe's
KEPT = ("--max_steps", "120", "--learning_rate", "5e-4", "--save_steps", "120", "--eval_strategy", "no")
FORMAT = r'format_match(pattern="#\\d+")'
WATCHED = "rlhf_zoo.corpora.tiny_sums:shows_work"

Call = Callable[[Sequence[str], Path], None]
Rows = Sequence[Mapping[str, Any]]
exact = ExactMatch(marker=MARKER)


@dataclass(frozen=True)
class Variant:
    """The recipe with other data or another reward. corpus, steps: arguments of its data, and steps of SFT on it.

    Without any, and so with the same data, its PPO starts from the recipe's SFT policy. prompts: for the verdict, where
    so few answers are right that the recipe's are too few.
    """

    name: str
    reward: str | None = None
    corpus: Mapping[str, Any] | None = None
    steps: int | None = None
    prompts: int | None = None

    def command(self, seed: int, runs: str) -> list[str]:
        words = _words("run", f"{runs}/{self.folder(seed).name}", seed)
        if self.corpus:
            words += ["--corpus_args", json.dumps(self.corpus)]
        if self.steps:
            words += ["--sft.max_steps", str(self.steps)]
        if self.prompts:
            words += ["--evaluation.checkpoint_prompts", str(self.prompts)]
        return words if self.reward is None else [*words, "--ppo.reward_funcs", json.dumps([self.reward, WATCHED])]

    def folder(self, seed: int) -> Path:
        return _folder(seed, self.name)


TWINS = (
    Variant("format", FORMAT),
    Variant(
        "anywhere",
        "rlhf_zoo.corpora.tiny_sums:anywhere",
        corpus={"digits": 3, "lines": 12000, "worked": 0, "guessed": 0.4, "off": 2},
        steps=1400,
        prompts=400,
    ),
)
FOUR = Variant("four-digits", corpus={"digits": 4})


def run(call: Call, seeds: Sequence[int]) -> None:
    """Trains what is not there yet: the recipe, SFT for twice as long, and rejection fine-tuning; and measures them."""
    runs = str(shown(RUNS))
    for seed in (one for one in SEEDS if one in seeds):
        folder = _folder(seed)
        if not keep.finished(folder):
            call(_words("run", f"{runs}/{RECIPE}-{seed}", seed), folder)
        longer, rejection = _folder(seed, "longer"), _folder(seed, "rejection")
        if not _finished(longer):
            call([*_words("sft", f"{runs}/{longer.name}", seed), *LONGER], longer)
        if not _finished(rejection):
            kept = rejection.with_name(f"{rejection.name}-lines")
            _keep_right(folder, kept)
            given = ("--model_name_or_path", str(shown(_checkpoint(folder, "sft"))))
            data = ("--sft.dataset_name", str(shown(kept)), "--dataset_config", "null", "--dataset_test_split", "null")
            call([*_words("sft", f"{runs}/{rejection.name}", seed), *given, *data, *KEPT], rejection)
        if not (folder / "sums.json").is_file():
            rivals = {"SFT for twice as long": longer, "rejection fine-tuning": rejection}
            write_json(folder / "sums.json", _measured(folder, rivals, samples=SAMPLES))


def run_twins(call: Call, seeds: Sequence[int]) -> None:
    for twin in TWINS:
        _run_variant(twin, call, [one for one in TWIN_SEEDS if one in seeds])


def run_four(call: Call, seeds: Sequence[int]) -> None:
    """Trains sums of four digits, which some SFT policies learn to add in their heads; and measures them."""
    asked = [one for one in SEEDS if one in seeds]
    _run_variant(FOUR, call, asked)
    for seed in asked:
        folder = FOUR.folder(seed)
        if not (folder / "sums.json").is_file():
            write_json(folder / "sums.json", _measured(folder, {}, samples=1))


def _run_variant(variant: Variant, call: Call, seeds: Sequence[int]) -> None:
    for seed in seeds:
        folder = variant.folder(seed)
        if keep.finished(folder):
            continue
        if not variant.corpus and not (folder / "sft").is_dir():
            for part in ("data", "sft"):
                shutil.copytree(_folder(seed) / part, folder / part)
        call(variant.command(seed, str(shown(RUNS))), folder)


def kept_runs() -> dict[str, Any]:
    """What is kept of the finished runs over seeds."""
    return _document(_kept(folder) for seed in SEEDS if _whole(folder := _folder(seed)))


def kept_twins() -> dict[str, Any]:
    found = [(twin.name, twin.folder(seed)) for twin in TWINS for seed in TWIN_SEEDS]
    return _document({"twin": name, **_kept(folder)} for name, folder in found if keep.finished(folder))


def kept_four() -> dict[str, Any]:
    return _document(_kept(folder) for seed in SEEDS if _whole(folder := FOUR.folder(seed)))


def _document(runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {"schema": 2, "recipe": RECIPE, "runs": list(runs)}


def _whole(folder: Path) -> bool:
    return keep.finished(folder) and (folder / "sums.json").is_file()


def _kept(folder: Path) -> dict[str, Any]:
    summary, evaluation = read_json(folder / "summary.json"), read_json(folder / "eval" / "evaluation.json")
    over, judge = evaluation["over_training"], evaluation["judge"]["name"]
    work = next(each for name, each in evaluation["judges"].items() if name != judge)
    return {
        "seed": summary["seed"],
        "command": StageRecord(folder / "ppo").read()["command"],
        "seconds": {stage: StageRecord(folder / stage).read()["seconds"] for stage in ("sft", "ppo", "eval")},
        "peak_rss_mib": summary["peak_rss_mib"],
        **{name: {side: evaluation[side][name] for side in ("sft", "ppo")} for name in ("reward", "judge")},
        "kl": evaluation["ppo"]["kl"],
        "shows_work": {side: work[side] for side in ("sft", "ppo")},
        **{name: over[name] for name in ("verdict", "kind", "without_judge", "present", "explained", "reasons")},
        **({"policies": read_json(path)} if (path := folder / "sums.json").is_file() else {}),
        "curve": [
            {
                "step": row["step"],
                "reward": row["objective/score"],
                "kl": row["objective/kl"],
                "shows_work": row["rewards/shows_work"],
            }
            for row in StageRecord(folder / "ppo").metrics()
            if "objective/kl" in row
        ],
    }


def _measured(folder: Path, rivals: Mapping[str, Path], *, samples: int) -> dict[str, Any]:
    """The figures of a run's policies, and of one answer to a problem those of rivals: name -> run of SFT alone."""
    tests, longer = (read_lines(folder / "data" / name / "test.jsonl") for name in ("prompts", "longer"))
    own = {stage.upper(): (_checkpoint(folder, stage), samples) for stage in ("sft", "ppo")}
    others = {name: (_checkpoint(one, "sft"), 1) for name, one in rivals.items()}
    return {name: figures(path, tests, longer, samples=many) for name, (path, many) in (own | others).items()}


def figures(path: Path, tests: Rows, longer: Rows, *, samples: int) -> dict[str, Any]:
    """Shares of right answers and of shown work, greedy and at T = 1, and on longer sums; 95% intervals over problems.

    samples: answers to each problem at T = 1; of several also majority vote and pass@samples.
    """
    greedy, sampled = answers(path, tests, samples=1, greedy=True), answers(path, tests, samples=samples)
    found = {"greedy": _right(tests, greedy), "greedy_work": _works(greedy)}
    found |= {"sampled": _right(tests, sampled), "sampled_work": _works(sampled)}
    if samples > 1:
        voted = [[_majority(each)] for each in sampled]
        passed = [float(any(_scores(row, each))) for row, each in zip(tests, sampled, strict=True)]
        found |= {"majority": _right(tests, voted), "pass": share(passed, range(len(passed))).to_json()}
    there = answers(path, longer, samples=1, greedy=True)
    return {**found, "longer": _right(longer, there), "longer_work": _works(there)}


def answers(path: Path, rows: Rows, *, samples: int, greedy: bool = False) -> list[list[str]]:
    """The completions of a policy, `samples` to each problem."""
    places = [(row, one) for row in range(len(rows)) for one in range(samples)]
    done = complete(
        load_causal(path),
        load_tokenizer(path),
        [rows[row]["prompt"] for row, _ in places],
        keys=[(STREAM, *place) for place in places],
        seed=1,
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
        top_p=GREEDY if greedy else 1.0,
        batch_size=500,
        desc=path.parent.parent.name,
    )
    return [done.texts[row * samples : (row + 1) * samples] for row in range(len(rows))]


def _keep_right(folder: Path, target: Path) -> None:
    """Writes the right ones of SFT's completions of the training prompts, one to a prompt, as lines."""
    prompts = read_lines(folder / "data" / "prompts" / "train.jsonl")[:CHECKS]
    written = answers(_checkpoint(folder, "sft"), prompts, samples=1)
    lines = [
        {"prompt": row["prompt"], "completion": each[0]}
        for row, each in zip(prompts, written, strict=True)
        if _scores(row, each)[0]
    ]
    write_text(target / "train.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def _scores(row: Mapping[str, Any], completions: Sequence[str]) -> list[float | None]:
    many = len(completions)
    return exact([row["prompt"]] * many, completions, answer=[row["answer"]] * many)


def _right(rows: Rows, completions: Sequence[Sequence[str]]) -> dict[str, Any]:
    scores = [(n, one or 0.0) for n, row in enumerate(rows) for one in _scores(row, completions[n])]
    return share([one for _, one in scores], [n for n, _ in scores]).to_json()


def _works(completions: Sequence[Sequence[str]]) -> dict[str, Any]:
    works = [(n, one) for n, each in enumerate(completions) for one in shows_work([], each)]
    return share([one for _, one in works], [n for n, _ in works]).to_json()


def _majority(completions: Sequence[str]) -> str:
    """The answer that most have; of equals the one that came first."""
    return MARKER + Counter(one.rpartition(MARKER)[2].strip() for one in completions).most_common(1)[0][0]


def _words(verb: str, directory: str, seed: int) -> list[str]:
    return ["rlhf-zoo", verb, RECIPE, "--output_dir", directory, "--hub", "local", "--seed", str(seed)]


def _folder(seed: int, what: str | None = None) -> Path:
    return RUNS / (f"{RECIPE}-{what}-{seed}" if what else f"{RECIPE}-{seed}")


def _checkpoint(folder: Path, stage: str) -> Path:
    path = StageRecord(folder / stage).chosen_checkpoint()
    assert path is not None  # a finished stage has one
    return path


def _finished(folder: Path) -> bool:
    return StageRecord(folder / "sft").read().get("status") == "finished"

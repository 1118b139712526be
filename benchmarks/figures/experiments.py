"""The experiments behind the docs, and their commands: each recipe over seeds, under β = 0, and beside baselines."""

import os
from dataclasses import dataclass
from pathlib import Path

from rlhf_zoo.pipeline.experiments.runner import Variant, make_variants
from rlhf_zoo.pipeline.experiments.sweep import ABLATION

ROOT = Path(__file__).parents[2]
#: The folder of the runs: runs/evidence in the repository, or RLHF_ZOO_EVIDENCE_RUNS.
RUNS = Path(os.environ.get("RLHF_ZOO_EVIDENCE_RUNS", ROOT / "runs" / "evidence")).absolute()
PARTS = ("runs", "ablation", "ensemble", "baselines")
# The names of files in docs/evidence.
#: Sums, whose answers a program checks.
SUMS = "tiny-sums"
#: Film reviews that a real model continues, under three seeds.
REVIEWS = "smollm2-reviews"
#: The planner's memory beside that of real runs.
PLAN = "plan"
#: How often the verdict is wrong on text of a real model.
REAL_TEXT = "real-text-rates"
#: Verdicts on changes by somebody who had not read the verdict's code.
OUTSIDE = "outside-list"
METHODS = ("best-of-n", "dpo", "rloo")
#: Runs are compared at their last checkpoints, whatever the verdict recommends.
RELEASE_LAST = ("--ppo.release", "last")


def relative(path: Path) -> Path:
    """Returns a path as a command in the repository's root names it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


@dataclass(frozen=True)
class Experiment:
    """The runs of one recipe.

    Each seed has a complete run. The ensemble and the baselines start from the run of the first seed. The ablation
    starts from the run of the second, as that of the first already contains PPO under other β for the baselines.

    Attributes:
        recipe: The recipe's name.
        seeds: The seeds of complete runs.
        beta: The recipe's β, which the ablation compares with 0.
        episodes: Episodes of each run of the ablation.
        ppo_seeds: Number of PPO's seeds in the ablation and beside the baselines, and of reward models in the ensemble.
        larger_beta: A larger β, under which PPO has the lower KL of a baseline.
        dpo_betas: Values of β for DPO, if none of the defaults comes near PPO's KL.
        data: The flags for data, each with its folder in RLHF_ZOO_DATA.
        parts: The parts of `PARTS` that are run.
    """

    recipe: str
    seeds: tuple[int, ...]
    beta: float
    episodes: int = 0
    ppo_seeds: int = 3
    larger_beta: float = 0.3
    dpo_betas: str = ""
    data: tuple[tuple[str, str], ...] = ()
    parts: tuple[str, ...] = PARTS

    def name(self, part: str) -> str:
        """Returns a part's name in docs/evidence and on the command line."""
        return self.recipe if part == "runs" else f"{self.recipe}-{part}"

    @property
    def variants(self) -> list[Variant]:
        """The runs of the ablation, β = 0 first."""
        return self._variants(0.0, self.beta, first=self.ablated_seed)

    @property
    def ablated_seed(self) -> int:
        """The seed of the run that the ablation starts from."""
        return self.seeds[1]

    @property
    def baseline_variants(self) -> list[Variant]:
        """The runs of PPO beside the baselines: the recipe's β and a larger one, with as many seeds as a baseline."""
        return self._variants(self.beta, self.larger_beta, first=self.seeds[0])

    def _variants(self, *betas: float, first: int) -> list[Variant]:
        return make_variants({"kl_coef": betas}, folder=ABLATION, seeds=self.ppo_seeds, first_seed=first)

    @property
    def _betas(self) -> str:
        return f"{self.beta:g},{self.larger_beta:g}"

    def run_folder(self, seed: int, runs: Path) -> Path:
        return runs / f"{self.recipe}-{seed}"

    def run_command(self, seed: int, data: str, runs: str = "runs/evidence") -> list[str]:
        return self._words("run", seed, data, runs)

    def ablate_command(self, data: str, runs: str = "runs/evidence") -> list[str]:
        flags = ["--kl_coef", f"0,{self.beta:g}", "--ppo.total_episodes", str(self.episodes)]
        return [*self._words("ablate", self.ablated_seed, data, runs), *flags, "--seeds", str(self.ppo_seeds)]

    def repeat_command(self, data: str, runs: str = "runs/evidence") -> list[str]:
        flags = ["--kl_coef", self._betas, "--seeds", str(self.ppo_seeds)]
        return [*self._words("ablate", self.seeds[0], data, runs), *flags]

    def ensemble_command(self, data: str, runs: str = "runs/evidence") -> list[str]:
        return [*self._words("ensemble", self.seeds[0], data, runs), "--seeds", str(self.ppo_seeds)]

    def baseline_command(self, method: str, data: str, runs: str = "runs/evidence") -> list[str]:
        flags = ["--beta", self.dpo_betas] if method == "dpo" and self.dpo_betas else []
        return [*self._words("baseline", self.seeds[0], data, runs), "--method", method, *flags]

    def _words(self, verb: str, seed: int, data: str, runs: str) -> list[str]:
        data_flags = [word for flag, folder in self.data for word in (flag, f"{data}/{folder}")]
        flags = ["--output_dir", str(self.run_folder(seed, Path(runs))), "--hub", "local", "--seed", str(seed)]
        return ["rlhf-zoo", verb, self.recipe, *flags, *RELEASE_LAST, *data_flags]


PROS_CONS = ("--dataset_name", "pros_cons")

EXPERIMENTS = (
    Experiment("tiny-world", tuple(range(1, 11)), beta=0.1, episodes=7680),
    Experiment(
        "product-remarks",
        (1, 2, 3),
        beta=0.12,
        episodes=5120,
        dpo_betas="0.06,0.12,0.24,0.36,0.48",
        data=(PROS_CONS, ("--evaluation.lexicon", "opinion_lexicon")),
    ),
    Experiment("remarks-count", (1, 2, 3), beta=0.05, data=(PROS_CONS,), parts=("runs",)),
    Experiment("arguments", (1, 2, 3), beta=0.1, data=(("--dataset_name", "ukp_convarg"),), parts=("runs",)),
)

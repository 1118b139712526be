"""The experiments behind the docs, and their commands: each recipe over seeds, and under β = 0."""

import os
from dataclasses import dataclass
from pathlib import Path

from rlhf_zoo.pipeline.experiments.runner import Variant, make_variants
from rlhf_zoo.pipeline.experiments.sweep import ABLATION

ROOT = Path(__file__).parents[2]
#: The folder of the runs: runs/evidence in the repository, or RLHF_ZOO_EVIDENCE_RUNS.
RUNS = Path(os.environ.get("RLHF_ZOO_EVIDENCE_RUNS", ROOT / "runs" / "evidence")).absolute()
PARTS = ("runs", "ablation")
# The names of files in docs/evidence.
#: Film reviews that a real model continues, under three seeds.
REVIEWS = "smollm2-reviews"
#: The planner's memory beside that of real runs.
PLAN = "plan"
#: Runs are compared at their last checkpoints, whatever the verdict recommends.
RELEASE_LAST = ("--ppo.release", "last")


def relative(path: Path) -> Path:
    """Returns a path as a command in the repository's root names it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


@dataclass(frozen=True)
class Experiment:
    """The runs of one recipe.

    Each seed has a complete run. The ablation starts from that of the second, as the first already contained PPO under
    other β, for the baselines.

    Attributes:
        recipe: The recipe's name.
        seeds: The seeds of complete runs.
        beta: The recipe's β, which the ablation compares with 0.
        episodes: Episodes of each run of the ablation.
        ppo_seeds: Number of PPO's seeds in the ablation.
        data: The flags for data, each with its folder in RLHF_ZOO_DATA.
        parts: The parts of `PARTS` that are run.
    """

    recipe: str
    seeds: tuple[int, ...]
    beta: float
    episodes: int = 0
    ppo_seeds: int = 3
    data: tuple[tuple[str, str], ...] = ()
    parts: tuple[str, ...] = PARTS

    def name(self, part: str) -> str:
        """Returns a part's name in docs/evidence and on the command line."""
        return self.recipe if part == "runs" else f"{self.recipe}-{part}"

    @property
    def variants(self) -> list[Variant]:
        """The runs of the ablation, β = 0 first."""
        betas = {"kl_coef": (0.0, self.beta)}
        return make_variants(betas, folder=ABLATION, seed_count=self.ppo_seeds, first_seed=self.ablated_seed)

    @property
    def ablated_seed(self) -> int:
        """The seed of the run that the ablation starts from."""
        return self.seeds[1]

    def run_folder(self, seed: int, runs: Path) -> Path:
        return runs / f"{self.recipe}-{seed}"

    def run_command(self, seed: int, data: str, runs: str = "runs/evidence") -> list[str]:
        return self._words("run", seed, data, runs)

    def ablate_command(self, data: str, runs: str = "runs/evidence") -> list[str]:
        flags = ["--kl_coef", f"0,{self.beta:g}", "--ppo.total_episodes", str(self.episodes)]
        return [*self._words("ablate", self.ablated_seed, data, runs), *flags, "--seeds", str(self.ppo_seeds)]

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
        data=(PROS_CONS, ("--evaluation.lexicon", "opinion_lexicon")),
    ),
    Experiment("remarks-count", (1, 2, 3), beta=0.05, data=(PROS_CONS,), parts=("runs",)),
    Experiment("arguments", (1, 2, 3), beta=0.1, data=(("--dataset_name", "ukp_convarg"),), parts=("runs",)),
)

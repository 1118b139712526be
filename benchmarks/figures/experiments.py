"""The experiments behind the docs, each a recipe over seeds, and their commands."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The folder of the runs: runs/evidence in the repository, or RLHF_ZOO_EVIDENCE_RUNS.
RUNS = Path(os.environ.get("RLHF_ZOO_EVIDENCE_RUNS", ROOT / "runs" / "evidence")).absolute()
#: Names of files in docs/evidence: a real model follows instructions that a program checks, and continues film reviews.
INSTRUCTIONS = "smollm2-ifeval"
REVIEWS = "smollm2-reviews"


@dataclass(frozen=True)
class Experiment:
    """The runs of one recipe.

    Attributes:
        recipe: The recipe's name, and that of its figures in docs/evidence.
        seeds: The seeds.
        beta: The recipe's β.
        data: The flags for data, each with its folder in RLHF_ZOO_DATA.
    """

    recipe: str
    seeds: tuple[int, ...]
    beta: float
    data: tuple[tuple[str, str], ...] = ()

    def run_folder(self, seed: int, runs: Path) -> Path:
        return runs / f"{self.recipe}-{seed}"

    def run_command(self, seed: int, data: str, runs: str = "runs/evidence") -> list[str]:
        """Returns the words of a run's command. Runs are compared at their last checkpoints."""
        flags = ["--output_dir", str(self.run_folder(seed, Path(runs))), "--hub", "local", "--seed", str(seed)]
        data_flags = [word for flag, folder in self.data for word in (flag, f"{data}/{folder}")]
        return ["rlhf-zoo", "run", self.recipe, *flags, "--ppo.release", "last", *data_flags]


PROS_CONS = ("--dataset_name", "pros_cons")

EXPERIMENTS = (
    Experiment("tiny-world", tuple(range(1, 11)), beta=0.1),
    Experiment("product-remarks", (1, 2, 3), 0.12, data=(PROS_CONS, ("--evaluation.lexicon", "opinion_lexicon"))),
    Experiment("remarks-count", (1, 2, 3), beta=0.05, data=(PROS_CONS,)),
    Experiment("arguments", (1, 2, 3), beta=0.1, data=(("--dataset_name", "ukp_convarg"),)),
)

"""What is run for the docs: each recipe over seeds, under β = 0, and beside its baselines; and by which commands."""

import os
from dataclasses import dataclass
from pathlib import Path

from rlhf_zoo.pipeline.experiments.runner import Variant, make_variants
from rlhf_zoo.pipeline.experiments.sweep import ABLATION

ROOT = Path(__file__).parents[2]
#: Where the runs lie: under the repository, or where RLHF_ZOO_EVIDENCE_RUNS says.
RUNS = Path(os.environ.get("RLHF_ZOO_EVIDENCE_RUNS", ROOT / "runs" / "evidence")).absolute()
PARTS = ("runs", "ablation", "ensemble", "baselines")
#: Sums with a reward that a program checks.
SUMS = "tiny-sums"
#: Film reviews continued by a real model, under three seeds.
REVIEWS = "smollm2-reviews"
#: What the planner says of a run's memory, beside what it took.
PLAN = "plan"
#: How often the verdict errs on the text of a real model.
REAL_TEXT = "real-text-rates"
#: What the verdict says of changes by somebody who had not read its code.
OUTSIDE = "outside-list"
METHODS = ("best-of-n", "dpo", "rloo")
#: Runs are compared at their ends, whatever the verdict recommends.
LAST = ("--ppo.release", "last")


def shown(path: Path) -> Path:
    """Of a path in the repository, as commands that run there name it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


@dataclass(frozen=True)
class Experiment:
    """One recipe: whole runs over `seeds`; ensemble and baselines start from the run of the first, and the ablation
    from that of the second: the first has an ablation of its own, PPO over seeds as long as the recipe's.

    beta: the recipe's own, which the ablation lays beside 0, in runs of `episodes` under `ppo_seeds` seeds of PPO; the
    ensemble has as many reward models. parts: those that are run of this recipe. data: its flags for data, with
    their folders under RLHF_ZOO_DATA.
    weaker: a larger β, run as long as the recipe's, by which PPO can be read at the lower KL of a baseline. dpo_betas:
    those of DPO, where its default has none near PPO's KL.
    """

    recipe: str
    seeds: tuple[int, ...]
    beta: float
    episodes: int = 0
    ppo_seeds: int = 3
    weaker: float = 0.3
    dpo_betas: str = ""
    data: tuple[tuple[str, str], ...] = ()
    parts: tuple[str, ...] = PARTS

    def name(self, part: str) -> str:
        """Of a part's file in docs/evidence, and on the command line."""
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
    def spread(self) -> list[Variant]:
        """PPO beside the baselines: under the recipe's β and a larger one, under as many seeds as each of them."""
        return self._variants(self.beta, self.weaker, first=self.seeds[0])

    def _variants(self, *betas: float, first: int) -> list[Variant]:
        return make_variants({"kl_coef": betas}, folder=ABLATION, seeds=self.ppo_seeds, first_seed=first)

    @property
    def _betas(self) -> str:
        return f"{self.beta:g},{self.weaker:g}"

    def directory(self, seed: int, runs: Path) -> Path:
        return runs / f"{self.recipe}-{seed}"

    def run(self, seed: int, data: str, runs: str = "runs/evidence") -> list[str]:
        return self._words("run", seed, data, runs)

    def ablate(self, data: str, runs: str = "runs/evidence") -> list[str]:
        asked = ["--kl_coef", f"0,{self.beta:g}", "--ppo.total_episodes", str(self.episodes)]
        return [*self._words("ablate", self.ablated_seed, data, runs), *asked, "--seeds", str(self.ppo_seeds)]

    def repeat(self, data: str, runs: str = "runs/evidence") -> list[str]:
        asked = ["--kl_coef", self._betas, "--seeds", str(self.ppo_seeds)]
        return [*self._words("ablate", self.seeds[0], data, runs), *asked]

    def ensemble(self, data: str, runs: str = "runs/evidence") -> list[str]:
        return [*self._words("ensemble", self.seeds[0], data, runs), "--seeds", str(self.ppo_seeds)]

    def baseline(self, method: str, data: str, runs: str = "runs/evidence") -> list[str]:
        asked = ["--beta", self.dpo_betas] if method == "dpo" and self.dpo_betas else []
        return [*self._words("baseline", self.seeds[0], data, runs), "--method", method, *asked]

    def _words(self, verb: str, seed: int, data: str, runs: str) -> list[str]:
        given = [word for flag, folder in self.data for word in (flag, f"{data}/{folder}")]
        place = str(self.directory(seed, Path(runs)))
        keys = ["--output_dir", place, "--hub", "local", "--seed", str(seed), *LAST, *given]
        return ["rlhf-zoo", verb, self.recipe, *keys]


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

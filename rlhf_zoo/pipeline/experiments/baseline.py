"""Baselines of a finished run, on the same data: best-of-n of its SFT policy, more SFT, and DPO and RLOO.

RUN/baseline/METHOD/ holds what a method leaves: for best-of-n the scores of the pool, for the others a directory for
each seed, and each β where it has one, with run.json and samples.jsonl. `baseline_report` lays them side by side with
PPO. All are measured as the eval stage measures PPO: on the same prompts, with the same random numbers.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from ...errors import ZooError
from ...evaluation.compute import Compute, Passes, ppo_compute, sft_compute
from ...evaluation.frontier import Floats, by_prompt
from ...evaluation.head_to_head import keys_of
from ...evaluation.judges.named import as_answers, checks_answers, scores
from ...evaluation.judges.rule import RuleJudge
from ...evaluation.measure import Evaluator, Measured, make_evaluator, measure, repeated
from ...fileio import now, write_text
from ...modeling.chat import append_completion, display_text, tokenize_for_reward, tokenize_prompt
from ...modeling.loading import load_tokenizer
from ...modeling.models import CRITIC_DIR, critic_from, load_causal, matrix_parameters
from ...modeling.prompt_keys import prompt_key
from ...modeling.text_ids import settle_ends
from ...rewards import Rewards
from ...runs.context import RunContext, versions
from ...runs.data.layout import fitting
from ...runs.dataset import DataSource, parts, stage_source
from ...runs.judge import evaluation_of
from ...runs.models import ParentCheckpoint
from ...runs.record import StageRecord, fingerprint, first_difference
from ...runs.settings.values import listed_numbers
from ..stages.evaluate import check_prompts, recorded
from ..stages.interrupt import Stopped
from ..stages.merged import whole_model
from ..stages.pairs import open_pairs, training_pairs
from ..stages.train import quiet
from .baseline_stages import LINES, liked_arguments, longer_arguments, sample_liked, sft_again, trained_tokens
from .baseline_trainers import Start, dpo_arguments, rloo_arguments, train_dpo, train_rloo

FOLDER = "baseline"
Trained = Literal["sft", "rejection", "dpo", "rloo"]
Method = Literal["best-of-n", Trained]
METHODS: tuple[Method, ...] = ("best-of-n", "sft", "rejection", "dpo", "rloo")
#: Keys of PPO by which a completion is paid, here as there.
PAID_BY = (
    "reward_model_path", "reward_model_loader", "reward_label", "reward_output", "reward_pad_token", "reward_ensemble",
    "reward_ensemble_lambda", "reward_funcs", "reward_weights", "score_centering", "score_scaling",
)  # fmt: skip
#: Those that hold a policy near SFT by a β.
HELD: tuple[Method, ...] = ("dpo", "rloo")
SIZES = (1, 2, 4, 8, 16, 32, 64)
POOL_STREAM = 9
_BLOCK = 8  # prompts whose pools are scored between two writes


@dataclass(frozen=True)
class Baseline:
    """A finished run, opened: its checkpoints, the held-out rows, and N of each of its models by role.

    lines: what eval/samples.jsonl says of each completion of sft and ppo, P · samples of them, by prompt.
    """

    context: RunContext
    source: DataSource
    checkpoints: Mapping[str, ParentCheckpoint]
    rows: Dataset
    lines: Mapping[str, Sequence[Mapping[str, Any]]]

    @property
    def folder(self) -> Path:
        return self.context.directory / FOLDER

    @property
    def per_prompt(self) -> int:
        return self.context.shared.evaluation.samples

    @cached_property
    def _evaluator(self) -> Evaluator:
        return make_evaluator(self.context, self.checkpoints["sft"].path)

    @property
    def tools(self) -> Evaluator:
        return self._evaluator.with_one_judge

    def beside(self, texts: Sequence[str]) -> dict[str, Floats]:
        """What rules find of a policy's completions beside the headline's score, by what it is called, (P,) each: what
        is made of all answers to a prompt, and the scores of the other rules.
        """
        _, prompts, columns = repeated(self.rows, self.per_prompt)
        found: dict[str, Floats] = {}
        for judge in (one for one in self._evaluator.panel.scoring if isinstance(one, RuleJudge)):
            if judge.name != self.judge:
                found[judge.name] = by_prompt(scores(judge, prompts, texts, columns), self.per_prompt)
            elif checks_answers(judge):
                found |= as_answers(judge, prompts, texts, columns, samples=self.per_prompt).of_all()
        return found

    @cached_property
    def prompt_keys(self) -> list[str]:
        """What tells the held-out rows' prompts apart, one a row."""
        return [prompt_key(prompt) for prompt in self.rows["prompt"]]

    @property
    def rewards(self) -> Rewards:
        assert self.tools.rewards is not None  # a recipe's PPO has one
        return self.tools.rewards

    @property
    def judge(self) -> str:
        return self.tools.judge.name

    @cached_property
    def sizes(self) -> dict[str, int]:
        """N by role: policy, reference, and reward and critic where there are such models."""
        policy = matrix_parameters(self.tools.reference)
        found = {"policy": policy, "reference": policy}
        for model in self.rewards.models:
            found["reward"] = found.get("reward", 0) + matrix_parameters(model.model)
        critic = self.checkpoints["ppo"].path / CRITIC_DIR
        if (critic / "config.json").is_file():
            found["critic"] = matrix_parameters(critic_from(critic))
        return found

    @cached_property
    def prompt_tokens(self) -> float:
        """Mean of the held-out prompts."""
        return float(np.mean([len(tokenize_prompt(one, self.tools.tokenizer)) for one in self.rows["prompt"]]))

    @cached_property
    def reward_training(self) -> Compute:
        """What training the reward model took, which all but DPO need; nothing where the recipe has none."""
        if "reward" not in self.checkpoints or "reward" not in self.sizes:
            return Compute()
        pairs, args = self.pairs(), self.context.settings("reward").trainer
        epochs = float(args.num_train_epochs)
        if args.max_steps > 0:
            epochs = args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps / len(pairs)
        texts = [append_completion(row["prompt"], row[side]) for row in pairs for side in ("chosen", "rejected")]
        tokens = sum(len(tokenize_for_reward(text, self.tools.tokenizer, ended=True)) for text in texts)
        return Compute({"reward": Passes(self.sizes["reward"], trained=tokens * epochs)})

    @property
    def episodes(self) -> int:
        """Completions that PPO sampled in training."""
        counts = [row["episodes"] for row in self.context.record("ppo").metrics() if row.get("episodes") is not None]
        if not counts:
            raise ZooError(
                f"{self.context.record('ppo').metrics_file} counts no episodes, so nothing can be made equal to PPO: "
                "train the stage ppo again."
            )
        return int(counts[-1])

    @property
    def updates(self) -> int:
        """Rollouts that PPO learned from in training."""
        return int(self.context.record("ppo").metrics()[-1]["step"])

    @cached_property
    def ppo_training(self) -> Compute:
        """What PPO's updates took, as its metrics count completions, their length and the epochs over them."""
        prompts = [len(tokenize_prompt(one, self.tools.tokenizer)) for one in self.prompts()["prompt"]]
        seen, completions, trained = 0.0, 0.0, 0.0
        for row in self.context.record("ppo").metrics():
            if row.get("episodes") is None:
                continue
            more = row["episodes"] - seen
            seen = row["episodes"]
            completions += more * row["completions/length"]
            trained += more * row["policy/epochs"] * (float(np.mean(prompts)) + row["completions/length"])
        return ppo_compute(
            self.sizes,
            prompt_tokens=seen * float(np.mean(prompts)),
            completion_tokens=completions,
            trained_tokens=trained,
        )

    def pairs(self) -> Dataset:
        """The pairs that the reward model was trained on."""
        return training_pairs(*open_pairs(self.context))[0]

    def prompts(self) -> Dataset:
        """The prompts that PPO rolled out."""
        rows, most = parts(self.context, "ppo", self.source)[0], self.context.settings("ppo").data.max_prompt_length
        return fitting(rows, self.tools.tokenizer, most, of="the prompts")[0]

    def resolved(self, **own: Any) -> dict[str, Any]:
        """Of a baseline's run.json: its own settings, and what it was measured on and started from."""
        shared, ppo = self.context.shared, self.context.settings("ppo").resolved
        return {
            **own,
            "paid_by": {key: ppo[key] for key in PAID_BY if key in ppo},
            "evaluation": recorded(evaluation_of(self.context)),
            "evaluation_seed": shared.seed,
            "response_length": self.tools.max_new_tokens,
            "temperature": self.tools.temperature,
            "data": self.source.lineage["fingerprint"],
            "parents": {
                stage: found.lineage["fingerprint"] for stage, found in self.checkpoints.items() if stage != "ppo"
            },
        }

    def begin(self, folder: Path, resolved: Mapping[str, Any], *, restart: bool) -> StageRecord | None:
        """The record of one part, marked as running; None where it is finished. Raises ZooError for other settings."""
        record = StageRecord(folder)
        if restart:
            record.clear()
        recipe = self.context.recipe.name
        record.check_fingerprint(resolved, recipe=recipe, mend="give what it was given, or --restart")
        if record.read().get("status") == "finished":
            return None
        record.write(
            stage=FOLDER,
            recipe=recipe,
            status="running",
            fingerprint=fingerprint(resolved),
            resolved=dict(resolved),
            versions=versions(),
            command=self.context.command,
        )
        return record


def betas(listed: str, method: Method) -> list[float]:
    """The values of "0.05,0.1", each once, in that order.

    Raises ZooError for what is no list of such numbers, and for 0 with DPO, whose loss then is a constant.
    """
    found = listed_numbers("--beta", listed, example="0.05,0.1,0.2")
    if method == "dpo" and 0.0 in found:
        raise ZooError("--beta lists 0, and DPO learns nothing with it: give numbers above 0.")
    return found


def default_betas(context: RunContext) -> list[float]:
    """PPO's kl_coef with its half and its double: the same KL-regularised objective has the same β in each method."""
    middle = context.settings("ppo").trainer.kl_coef or 0.1
    return [middle / 2, middle, middle * 2]


def open_baseline(context: RunContext, method: Method) -> Baseline:
    """What a baseline of this run starts from and is compared with.

    Raises ZooError where a stage of the run is not finished, or was run with other settings than the flags say.
    """
    quiet()
    recipe, stages = context.recipe, list(context.recipe.stages)
    if method == "dpo" and "reward" not in stages:
        raise ZooError(
            f"The recipe {recipe.name} has no stage reward, so there are no pairs that DPO could learn from."
        )
    if "ppo" not in stages:
        raise ZooError(f"The recipe {recipe.name} has no stage ppo, so there is nothing to compare a baseline with.")
    for stage in [*stages, "eval"]:
        record = context.record(stage)
        if record.read().get("status") != "finished":
            raise ZooError(
                f"The stage {stage} is not finished in {context.directory}, and a baseline is compared with a finished "
                f"run: `rlhf-zoo run {recipe.called} --output_dir {context.directory}` first."
            )
    _check_settings(context)
    source = stage_source(context, "ppo")
    rows = check_prompts(context, source, context.checkpoint("sft").path)
    checkpoints = {stage: context.checkpoint(stage) for stage in stages}
    lines = read_sides(context.record("eval").path / "samples.jsonl", rows, context.shared.evaluation.samples)
    return Baseline(context, source, checkpoints, rows, lines)


def _check_settings(context: RunContext) -> None:
    """Raises ZooError where a stage or the evaluation ran with other settings than these."""
    given = {
        **{stage: dict(context.settings(stage).resolved) for stage in context.recipe.stages},
        "eval": {
            "evaluation": recorded(evaluation_of(context)),
            "seed": context.shared.seed,
        },
    }
    for stage, asked in given.items():
        before = context.record(stage).read()["resolved"]
        ran = {key: before[key] for key in before if key not in ("data", "parents", "own_pairs")}
        if (key := first_difference(ran, asked)) is not None:
            raise ZooError(
                f"The stage {stage} in {context.directory} ran with another {key} than this command says: give the "
                "flags that the run was given."
            )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a samples.jsonl. Only a newline ends one: a completion may hold what else counts as a line's end."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def read_samples(path: Path, prompts: Sequence[Any], per_prompt: int) -> list[dict[str, Any]]:
    """The lines of a samples.jsonl of the eval stage. Raises ZooError where it is damaged, or of other prompts."""
    mend = "make it again with `rlhf-zoo eval --restart`."
    try:
        lines = read_lines(path)
    except (FileNotFoundError, ValueError) as error:
        raise ZooError(f"{path} cannot be read ({error}): {mend}") from error
    asked = [display_text(prompt).rstrip() for prompt in prompts for _ in range(per_prompt)]
    if [line["prompt"].rstrip() for line in lines] != asked:
        raise ZooError(f"{path} holds other prompts than the data set: {mend}")
    return lines


def read_sides(path: Path, rows: Dataset, per_prompt: int) -> dict[str, list[dict[str, Any]]]:
    """Each completion of sft and ppo and what was found of it, in the order of the eval stage."""
    lines = read_samples(path, rows["prompt"], per_prompt)
    return {side: [line[side] for line in lines] for side in ("sft", "ppo")}


def run_best_of_n(baseline: Baseline, *, pool: int, restart: bool) -> None:
    """Samples and scores one pool for each held-out prompt; prompts that were scored before are left.

    Rows of metrics.jsonl: step (the prompt's place), reward, judge, length: (pool,) each.
    """
    started = time.monotonic()
    record = baseline.begin(baseline.folder / "best-of-n", baseline.resolved(pool=pool), restart=restart)
    if record is None:
        return
    scored = {row["step"] for row in record.metrics()}
    left = [place for place in range(len(baseline.rows)) if place not in scored]
    try:
        for start in range(0, len(left), _BLOCK):
            _score_pools(baseline, left[start : start + _BLOCK], pool, record)
    except KeyboardInterrupt as error:
        record.write(status="interrupted")
        raise Stopped from error
    seconds = record.read().get("seconds", 0.0) + time.monotonic() - started
    record.write(status="finished", seconds=seconds, finished=now())


def _score_pools(baseline: Baseline, places: Sequence[int], pool: int, record: StageRecord) -> None:
    tools = baseline.tools
    _, prompts, columns = repeated(baseline.rows.select(places), pool)
    keys = [(POOL_STREAM, place, k) for place in places for k in range(pool)]
    desc = f"pools of prompts {places[0] + 1} to {places[-1] + 1}"
    done = tools.sampled(tools.reference, prompts, keys=keys, seed=baseline.context.shared.seed, desc=desc)
    reward: list[float] = []
    for batch in done.batches:
        chosen = slice(len(reward), len(reward) + len(batch))
        reward += tools.reward_of(batch, chosen, prompts, done.texts, columns)
    judge = scores(tools.judge, prompts, done.texts, columns)
    for number, place in enumerate(places):
        own = slice(number * pool, (number + 1) * pool)
        record.append_metrics({"step": place, "reward": reward[own], "judge": judge[own], "length": done.lengths[own]})


def run_trained(
    baseline: Baseline,
    method: Trained,
    seed: int,
    *,
    beta: float | None = None,
    learning_rate: float | None,
    restart: bool,
) -> None:
    """Trains and measures one policy under a seed, and a β where the method has one, unless that is finished."""
    started = time.monotonic()
    arguments = _arguments(baseline, method, learning_rate)
    under = {} if beta is None else {"beta": beta}
    resolved = baseline.resolved(method=method, **under, seed=seed, arguments=arguments)
    name = f"seed-{seed}" if beta is None else f"beta-{beta:g}-seed-{seed}"
    folder = baseline.folder / method / name
    if restart:
        StageRecord(folder / "sft").clear()
    elif method not in HELD:
        _measure_anew(StageRecord(folder), resolved)
    record = baseline.begin(folder, resolved, restart=restart)
    if record is None:
        return
    record.metrics_file.unlink(missing_ok=True)  # a run of trl's trainers that was cut off begins again
    try:
        if method == "dpo" or method == "rloo":
            assert beta is not None
            policy, compute = _train(baseline, method, beta, seed, arguments, record)
        else:
            policy, compute = _more_sft(baseline, method, seed, arguments, record)
        found = _measure(baseline, policy, desc=f"evaluating {method} {name.replace('-', ' ')}")
    except (KeyboardInterrupt, Stopped) as error:
        record.write(status="interrupted")
        raise Stopped from error
    write_text(record.path / "samples.jsonl", _lines(baseline, found))
    record.write(
        status="finished",
        **under,
        seed=seed,
        compute=compute.to_json(),
        seconds=time.monotonic() - started,
        finished=now(),
    )


def _measure_anew(record: StageRecord, resolved: Mapping[str, Any]) -> None:
    """Lets a policy that lies on the disk be measured as another evaluation measures; what it learned stays."""
    before = record.read().get("resolved") or {}
    of = ("evaluation", "evaluation_seed")
    learned = [{key: value for key, value in one.items() if key not in of} for one in (before, resolved)]
    if before and first_difference(*learned) is None and first_difference(before, resolved) is not None:
        record.write(status="interrupted", resolved=dict(resolved), fingerprint=fingerprint(resolved))


def _arguments(baseline: Baseline, method: Trained, learning_rate: float | None) -> dict[str, Any]:
    settings = baseline.context.settings
    if method == "dpo":
        found = dpo_arguments(settings("ppo"), settings("reward"), learning_rate=learning_rate)
    elif method == "rloo":
        found = rloo_arguments(settings("ppo"), episodes=baseline.episodes, learning_rate=learning_rate)
    elif method == "rejection":
        updates = baseline.updates
        found = liked_arguments(settings("ppo"), settings("sft"), updates=updates, learning_rate=learning_rate)
    else:
        found = longer_arguments(settings("sft"), learning_rate=learning_rate)
    return {name: getattr(value, "value", value) for name, value in found.items()}


def _more_sft(
    baseline: Baseline,
    method: Literal["sft", "rejection"],
    seed: int,
    arguments: Mapping[str, Any],
    record: StageRecord,
) -> tuple[PreTrainedModel, Compute]:
    context, flags = baseline.context, {**arguments, "seed": seed}
    if method == "rejection":
        if "sampled" not in record.read():
            liked = sample_liked(baseline.tools, baseline.prompts(), baseline.episodes, seed=seed)
            liked.write(record.path)
            StageRecord(record.path / "sft").clear()  # what it learned was of other lines
            record.write(sampled=liked.counts())
        start = whole_model(context, baseline.checkpoints["sft"])
        flags |= {"model_name_or_path": str(start), "dataset_name": str(record.path / LINES)}
    run = sft_again(context, record.path, flags)
    policy = load_causal(run.checkpoint("sft").path)
    tokens = trained_tokens(run, parts(run, "sft", stage_source(run, "sft"))[0], baseline.tools.tokenizer)
    if method == "sft":  # half of it is the run's own, which no method is charged for
        return policy, sft_compute(baseline.sizes, trained_tokens=tokens / 2)
    sampled = record.read()["sampled"]
    read = {name: sampled[name] for name in ("prompt_tokens", "completion_tokens")}
    return policy, sft_compute(baseline.sizes, trained_tokens=tokens, **read)


def _train(
    baseline: Baseline,
    method: Literal["dpo", "rloo"],
    beta: float,
    seed: int,
    arguments: Mapping[str, Any],
    record: StageRecord,
) -> tuple[PreTrainedModel, Compute]:
    from transformers import set_seed
    from trl import get_peft_config

    ppo = baseline.context.settings("ppo")
    sft, desc = baseline.checkpoints["sft"].path, f"{method} β={beta:g} seed {seed}"
    tokenizer = load_tokenizer(sft)
    settle_ends(tokenizer)  # trl reads prompts by the tokenizer alone
    start = Start(sft, tokenizer, beta, seed, record, desc, get_peft_config(ppo.model))
    set_seed(seed)
    if method == "dpo":
        return train_dpo(start, baseline.pairs(), arguments=arguments, sizes=baseline.sizes)
    return train_rloo(
        start,
        baseline.prompts(),
        baseline.rewards,
        arguments=arguments,
        sizes=baseline.sizes,
        missing_eos={"penalty": ppo.trainer.missing_eos_penalty, "score": ppo.trainer.missing_eos_score},
        score_clip=ppo.trainer.score_clip,
    )


@torch.no_grad()
def _measure(baseline: Baseline, policy: PreTrainedModel, *, desc: str) -> Measured:
    """As the eval stage measures PPO: equal prompts, keys and seed."""
    _, prompts, others = repeated(baseline.rows, baseline.per_prompt)
    keys, seed = keys_of(len(prompts), baseline.per_prompt), baseline.context.shared.seed
    return measure(policy, baseline.tools, prompts, keys=keys, seed=seed, desc=desc, columns=others)


def _lines(baseline: Baseline, found: Measured) -> str:
    per_prompt = baseline.per_prompt
    prompts = [display_text(prompt) for prompt in baseline.rows["prompt"] for _ in range(per_prompt)]
    rows = (
        {"prompt": prompt, "sample": i % per_prompt, **found.row(i, baseline.judge)} for i, prompt in enumerate(prompts)
    )
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

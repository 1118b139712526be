"""`rlhf-zoo doctor`: a sound run passes every check, a planted fault fails its own check, and no file changes."""

import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from folders import file_digests
from safetensors.torch import load_file, save_file
from toy_run import BACKWARDS, PPO, make_context, make_recipe, save_start
from trainer_fixture import CONTEXT, make_policy, make_reward_model, make_tokenizer
from zoo_process import zoo

from rlhf_zoo.cli import main as cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.critic import critic_from
from rlhf_zoo.modeling.sampling.sampler import Samples
from rlhf_zoo.pipeline.inspect import doctor
from rlhf_zoo.pipeline.inspect.doctor import examine
from rlhf_zoo.pipeline.inspect.examination import FAILED, OK, SKIPPED, WARNING, Finding
from rlhf_zoo.ppo import engines as ppo_engines
from rlhf_zoo.runs.record import StageRecord

CHECKS = [
    "keys", "columns", "epochs", "reward functions", "prompts", "answers", "batch", "models", "room",
    "evaluation's prompts", "judges",
    "sft checkpoint", "reward checkpoint", "value model", "policy", "tokenizer", "prompt length", "prompt ids",
    "policy's tokenizer", "reward head",
    "reward model's tokenizer", "reward reads the end", "trainer", "critic", "end tokens", "KL at the start", "ratio",
    "rewards", "rewards add up",
]  # fmt: skip
EVALUATED = "evaluation: {judge: 'toy_run:judge', prompts: 6}\n"
BUILT_IN = "rlhf_zoo.rewards.verifiable"


def too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * min(7, len(completions))


def equal_rewards(completions: list[str], **_: Any) -> list[float]:
    return [0.25] * len(completions)


@dataclass(frozen=True)
class World:
    """A folder with the recipe `toy`, its data, and a run whose sft and reward stages are finished."""

    folder: Path

    @property
    def sft(self) -> Path:
        return self.folder / "run/sft/checkpoint-4"

    @property
    def reward(self) -> Path:
        return self.folder / "run/reward/checkpoint-4"

    def findings(self, **flags: Any) -> dict[str, Finding]:
        before = file_digests(self.folder)
        results = examine(make_context(self.folder, **flags))
        assert file_digests(self.folder) == before, "the doctor changes no file"
        assert [finding.check for finding in results] == CHECKS
        return {finding.check: finding for finding in results}


@pytest.fixture(scope="module")
def sound_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world with nothing wrong, which no test may change."""
    world = World(tmp_path_factory.mktemp("sound"))
    make_recipe(world.folder)
    save_start(world.folder)
    return world


@pytest.fixture
def world(sound_world: World, tmp_path: Path) -> World:
    shutil.copytree(sound_world.folder, tmp_path / "world")
    for path in (tmp_path / "world").rglob("COMPLETE"):  # without digests, the planted fault itself must be found
        path.write_text('{"files": {}}\n')
    return World(tmp_path / "world")


def test_doctor_passes_sound_run(sound_world: World) -> None:
    findings = sound_world.findings()
    assert {finding.check: finding.status for finding in findings.values()} == dict.fromkeys(CHECKS, OK)
    assert findings["prompts"].detail == "12 for rollouts, 12 to monitor training; columns prompt, answer, row"
    assert findings["batch"].detail == "4 of 12 prompts per update, 4 completions in 1 minibatches"
    assert findings["prompt length"].detail == f"the longest has 4 tokens; with a response of 10: 14 of {CONTEXT}"
    assert findings["tokenizer"].detail == "EOS <eos> = 1, PAD <pad> = 0; the highest id is 16, of 17 embedding rows"
    kl, mismatch = findings["KL at the start"].detail.split()[0], findings["ratio"].detail.split()[3]
    assert abs(float(kl)) < 1e-4 and float(mismatch) < 1e-5
    assert not (sound_world.folder / "run/ppo").exists()


def pad_with_eos(world: World) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(world.sft)


def swap_policy_tokenizer(world: World) -> None:
    for path in (world.sft, world.reward):
        make_tokenizer(BACKWARDS + ":;").save_pretrained(path)


def swap_reward_tokenizer(world: World) -> None:
    make_tokenizer(BACKWARDS + ":;").save_pretrained(world.reward)


def remove_reward_head(world: World) -> None:
    weights = load_file(world.reward / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, world.reward / "model.safetensors", metadata={"format": "pt"})


def zero_reward_head(world: World) -> None:
    model = make_reward_model()
    torch.nn.init.zeros_(model.score.weight)
    model.save_pretrained(world.reward)


def remove_policy_weights(world: World) -> None:
    (world.sft / "model.safetensors").unlink()


def change_data(world: World, change: Callable[[dict], dict]) -> None:
    """Changes the recipe's data in this world only."""
    for path in (world.folder / "data/prompts").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    recipe = world.folder / "toy/recipe.yaml"
    recipe.write_text(f"description: A toy.\ndataset_name: {world.folder / 'data'}\n{EVALUATED}")


def lengthen_prompts(world: World) -> None:
    change_data(world, lambda row: {**row, "prompt": row["prompt"] if row["row"] else "a" * (CONTEXT - 9)})


def rename_prompt_column(world: World) -> None:
    change_data(world, lambda row: {"question": row["prompt"]})


def set_evaluation_keys(**keys: Any) -> Callable[[World], None]:
    def plant(world: World) -> None:
        recipe = world.folder / "toy/recipe.yaml"
        shared = yaml.safe_load(recipe.read_text())
        recipe.write_text(yaml.safe_dump({**shared, "evaluation": {**shared["evaluation"], **keys}}))

    return plant


FAULTS: dict[str, tuple[Callable[[World], None] | None, dict[str, Any], str, str]] = {
    "PAD is EOS": (pad_with_eos, {}, "tokenizer", "set pad_token of the stage"),
    "policy's tokenizer swapped": (
        swap_policy_tokenizer, {}, "policy's tokenizer",
        "was probably trained with another tokenizer, because the policy's loss on the prompts is ",
    ),
    "reward's tokenizer swapped": (
        swap_reward_tokenizer, {}, "reward model's tokenizer",
        "differs from the SFT policy's, with which the recipe's reward model is trained: tokenizers may be swapped",
    ),
    "fresh reward head": (remove_reward_head, {}, "reward head", "has no trained head (score.weight is missing"),
    "blind reward model": (zero_reward_head, {}, "reward reads the end", "it does not read the last token"),
    "no weights": (remove_policy_weights, {}, "policy", "cannot be loaded as a causal language model"),
    "prompts too long": (lengthen_prompts, {}, "room", f"the longest prompt has {CONTEXT - 9} tokens, but"),
    "no column": (rename_prompt_column, {}, "prompts", "has no column 'prompt', only 'question'"),
    "key": (None, {"kl_coff": 1}, "keys", "--ppo.kl_coff is not a key of the stage ppo, did you mean 'kl_coef'?"),
    "reward name": (
        None, {"reward_funcs": f"{BUILT_IN}:lenght(target=20,unit='words')"}, "reward functions",
        "There is no 'lenght' in the module 'rlhf_zoo.rewards.verifiable', did you mean 'length'?",
    ),
    "no answers": (
        None, {"reward_funcs": "exact_match(column='solution')"}, "answers",
        "reads the column 'solution', but the prompts have 'answer', 'row': set the column of the answers",
    ),
    "weights": (None, {"reward_weights": "1,2"}, "reward functions", "reward_weights has 2 numbers for 1 rewards"),
    "no labels": (
        set_evaluation_keys(judge=None), {}, "judges",
        "The judge classifier has no labeled texts (The data set ",
    ),
    "no such judge": (set_evaluation_keys(judge="clasifier"), {}, "judges", "did you mean 'classifier'?"),
    "few held-out prompts": (
        set_evaluation_keys(prompts=99), {}, "evaluation's prompts",
        "The test split has 12 prompts, but evaluation.prompts is 99",
    ),
    "few prompts": (
        None, {"per_device_train_batch_size": 13}, "batch", "has 12 rows, but an update needs 13: use more prompts",
    ),
    "no such model": (None, {"model_name_or_path": "a b"}, "models", "The model a b cannot be found on"),
    "wrong count": (None, {"reward_funcs": "test_doctor:too_few"}, "rewards", "returned 7 rewards for 8 completions"),
    "critic": (None, {"critic": "reward", "reward_model_path": "none", "reward_funcs": f"{BUILT_IN}:length"}, "trainer",
               "critic is 'reward', but no reward model has one output and the policy's tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_doctor_fails_only_check_of_planted_fault(world: World, name: str) -> None:
    plant, flags, check, message = FAULTS[name]
    if plant is not None:
        plant(world)
    findings = world.findings(**flags)
    assert (findings[check].status, message in findings[check].detail) == (FAILED, True), findings[check]
    failed_checks = [check_name for check_name in CHECKS if findings[check_name].status == FAILED]
    assert failed_checks == [check], "no other check fails"
    assert {finding.detail for finding in findings.values() if finding.status == SKIPPED} <= {
        f"needs the check {check!r}, which failed"
    }
    if check == "keys":
        assert all(findings[check_name].status == SKIPPED for check_name in CHECKS[1:])
    elif flags:
        assert findings["keys"].status == OK and findings["epochs"].status == OK, "independent checks still run"


def test_doctor_names_model_folder_without_weights(world: World) -> None:
    bare = world.folder / "bare"
    shutil.copytree(world.sft, bare, ignore=shutil.ignore_patterns("*.safetensors", "COMPLETE"))
    findings = world.findings(model_name_or_path=str(bare))
    assert findings["models"].status == FAILED
    assert findings["models"].detail.startswith(f"The model in {bare} has no weights: copy model.safetensors there")


# Defects of a changed trainer


def failures(findings: dict[str, Finding]) -> dict[str, str]:
    return {finding.check: finding.detail for finding in findings.values() if finding.status == FAILED}


def scale_training_logits(trainer: Any) -> None:
    trainer.policy.lm_head.register_forward_hook(lambda head, _, logits: logits * 1.5 if head.training else logits)


def broadcast_score(trainer: Any) -> None:
    trainer.token_rewards = lambda scores, kl, mask, kl_coef: (scores.unsqueeze(1) - kl_coef * kl) * mask


def raise_value_error(trainer: Any) -> None:
    raise ValueError("target modules\nmore")


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        (scale_training_logits, "ratio", "In the first pass log π differs from the sampler's"),
        (broadcast_score, "rewards add up", "broadcast to every token"),
        (raise_value_error, "trainer", "ValueError: target modules"),
        (None, "KL at the start", "nats per completion, although the run starts at its reference"),
    ],
)
def test_doctor_finds_defect_of_changed_trainer(
    sound_world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None] | None, check: str, message: str
) -> None:
    """With `change` None, the reference differs from the policy."""
    build = doctor.build_trainer

    def build_changed(*args: Any, **kwargs: Any) -> Any:
        if change is None:
            return build(*args, **{**kwargs, "ref_model": make_policy(seed=9)})
        trainer = build(*args, **kwargs)
        change(trainer)
        return trainer

    monkeypatch.setattr(doctor, "build_trainer", build_changed)
    details = failures(sound_world.findings())
    assert details.keys() == {check} and message in details[check] and "\n" not in details[check]


def test_doctor_fails_when_mask_lacks_end_token(sound_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    original_sample = ppo_engines.sample

    def without_end(*args: Any, **kwargs: Any) -> Samples:
        samples = original_sample(*args, **kwargs)
        mask = samples.mask.clone()
        mask[samples.ended, samples.mask.sum(1)[samples.ended] - 1] = False
        return replace(samples, mask=mask)

    monkeypatch.setattr(ppo_engines, "sample", without_end)
    details = failures(sound_world.findings())
    assert (
        details.keys() == {"end tokens"} and "the end token must be the last one in the mask" in details["end tokens"]
    )


# Warnings


def test_doctor_fails_when_critic_returns_nan(world: World) -> None:
    critic = critic_from(make_reward_model())
    torch.nn.init.constant_(critic.score.bias, math.nan)
    critic.save_pretrained(world.folder / "critic")
    details = failures(world.findings(value_model_name_or_path=str(world.folder / "critic")))
    assert "The critic returned NaN or infinite values for 8 of 8" in details.pop("critic")
    assert details.keys() == {"end tokens"}, "the rollout also needs the critic's values"


@pytest.mark.parametrize(
    ("flags", "check", "message"),
    [
        ({"num_ppo_epochs": 5}, "epochs", "num_ppo_epochs is 5. After 4 epochs the policy is far from the one that"),
        ({"kl_estimator": "k3"}, "trainer", "kl_estimator 'k3' in the reward follows"),
        (
            {"reward_model_path": "none", "reward_funcs": "test_doctor:equal_rewards"}, "rewards",
            "All 8 completions of the trial rollout score 0.25, so there is nothing to learn from them",
        ),
    ],
)  # fmt: skip
def test_doctor_warns_once_and_fails_nothing(
    sound_world: World, flags: dict[str, Any], check: str, message: str
) -> None:
    findings = sound_world.findings(**flags)
    assert {finding.check for finding in findings.values() if finding.status != OK} == {check}
    assert findings[check].status == WARNING and findings[check].detail.startswith(message)


def test_doctor_warns_when_policy_is_untrained(world: World) -> None:
    make_policy().save_pretrained(world.sft)
    findings = world.findings()
    assert (
        findings["policy's tokenizer"].status == WARNING and "may be untrained" in findings["policy's tokenizer"].detail
    )
    assert not failures(findings)


def test_doctor_fails_when_judge_needs_reserved_pairs(world: World) -> None:
    recipe, reward = world.folder / "toy/recipe.yaml", world.folder / "toy/reward.yaml"
    keys = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(keys | {"evaluation": keys["evaluation"] | {"judge": "same-labels"}}))
    reward.write_text("bf16: false\njudge_share: 0.5\n")
    finding = world.findings()["judges"]
    assert (
        finding.status == FAILED
        and "reserves no pairs: set judge_share there, for example to 0.5, and train it again with `" in finding.detail
    )


# Other kinds of runs


@pytest.mark.parametrize(
    "flags",
    [
        {"reward_model_path": "none", "reward_funcs": f"{BUILT_IN}:length(target=4,unit='characters')"},
        {"critic": "shared", "action_level": "sequence", "missing_eos_penalty": 1},
        {"ptx_coef": 0.1, "num_generations": 2, "kl_in": "loss", "kl_estimator": "k2", "whiten_rewards": True},
        {"use_peft": True, "lora_target_modules": "q_proj,v_proj", "lora_r": 2},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_doctor_passes_other_settings(sound_world: World, flags: dict[str, Any]) -> None:
    findings = sound_world.findings(**flags)
    assert {finding.check: finding.detail for finding in findings.values() if finding.status != OK} == {}
    if "ptx_coef" in flags:
        assert "12 texts for ptx_coef" in findings["prompts"].detail and "8 completions" in findings["batch"].detail


def test_doctor_reads_prepared_data_of_run(world: World) -> None:
    """It uses data that a corpus has prepared in the run directory, and otherwise prepares them elsewhere."""
    (world.folder / "toy/recipe.yaml").write_text(
        "description: A toy.\ncorpus: rlhf_zoo.runs.corpora.tiny_world_2:prepare\n"
        f"corpus_args: {{lines: 300}}\n{EVALUATED}"
    )
    findings = world.findings()
    assert findings["prompts"].status == OK and "columns prompt" in findings["prompts"].detail
    StageRecord(world.folder / "run/data").write(
        stage="data", recipe="toy", status="finished", resolved={"seed": 7}, fingerprint="of another run"
    )
    findings = world.findings()
    assert findings["prompts"].status == FAILED and "has a run with" in findings["prompts"].detail
    assert findings["policy"].status == OK


# The command


@pytest.fixture
def command(no_hub: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sound_world: World):
    """Runs the command in this process; returns its exit code and stdout."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(sound_world.folder)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["rlhf-zoo", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return int(exit_info.value.code or 0), capsys.readouterr().out

    return run


def test_doctor_prints_table_and_exits_2_on_failure(
    command: Callable[..., tuple[int, str]], sound_world: World
) -> None:
    before = file_digests(sound_world.folder)
    code, output = command("doctor", "toy", "--output_dir", "run")
    assert code == 0 and all(f" {check} " in output for check in CHECKS) and "failed" not in output
    code, output = command("doctor", "toy", "--output_dir", "run", "--num_ppo_epochs", "5")
    assert code == 0 and " warning " in output
    code, output = command("doctor", "toy", "--output_dir", "run", "--ppo.reward_funcs", "x[red]:f", "--json")
    assert code == 2
    rows = {row["check"]: row for row in json.loads(output)}
    failed_row = rows["reward functions"]
    assert list(rows) == CHECKS and failed_row["status"] == FAILED and "[red]" in failed_row["detail"]
    assert file_digests(sound_world.folder) == before


def test_validate_checks_reward_function_names_and_weights(command: Callable[..., tuple[int, str]]) -> None:
    validate = ("recipes", "validate", "toy", "--ppo.reward_funcs")
    two = f'{BUILT_IN}:length(target=20,unit="words"),{BUILT_IN}:repetition'
    assert command(*validate, two) == (0, "toy is valid: sft, reward, ppo.\n")
    assert command(*validate, two, "--ppo.reward_weights", "1,2,3")[0] == 0
    assert command(*validate, two, "--ppo.reward_weights", "1,2")[0] == 2
    assert command(*validate, f"{BUILT_IN}:lenght")[0] == 2


def test_doctor_skips_model_checks_before_training(tmp_path: Path) -> None:
    """Checks that need no model run. The command is a separate process with an empty Hub."""
    make_recipe(tmp_path)
    process = zoo(
        "doctor", "toy", "--output_dir", "run", "--reward_funcs", "lenght", "--json", home=tmp_path / "h", cwd=tmp_path
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    rows = {row["check"]: row for row in json.loads(process.stdout)}
    status = {check: row["status"] for check, row in rows.items()}
    assert status.pop("reward functions") == FAILED
    ready = ("keys", "columns", "epochs", "prompts", "batch", "models", "room", "evaluation's prompts", "value model")
    assert status == {check: OK if check in ready else SKIPPED for check in status}
    assert rows["tokenizer"]["detail"] == "train the sft stage first"
    assert rows["reward head"]["detail"] == "train the reward stage first"
    assert "Not publishing." in process.stderr and "Publishing" not in process.stderr
    assert not (tmp_path / "run").exists() and PPO["max_steps"] == 3
    with pytest.raises(ZooError, match="There is no recipe 'none'"):
        cli.cli.main(["doctor", "none"], standalone_mode=False)


@pytest.mark.parametrize(
    ("key", "subject"), [("ppo.reward_funcs", "A reward function"), ("evaluation.judge", "The judge rule:")]
)
def test_validate_calls_rewards_and_judge_rules(
    command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, key: str, subject: str
) -> None:
    name = "toy_run:answered" if key == "ppo.reward_funcs" else "rule:toy_run:answered"
    assert command("recipes", "validate", "toy", f"--{key}", name) == (0, "toy is valid: sft, reward, ppo.\n")

    def failing_reward(completions: list[str], row: list[int], **_: Any) -> list[float]:
        raise ValueError(f"broken at row {row[0]}")

    monkeypatch.setattr("toy_run.answered", failing_reward)
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    assert command("recipes", "validate", "toy", f"--{key}", name) == (2, "")
    assert (
        subject in errors.getvalue() and "broken at row 0" in errors.getvalue() and errors.getvalue().count("\n") == 1
    )

"""`rlhf-zoo doctor`: a sound run passes every check, a planted fault is found by its name, and nothing is touched."""

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
from folders import tree
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


def broken(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * min(7, len(completions))


def alike(completions: list[str], **_: Any) -> list[float]:
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

    def examined(self, **flags: Any) -> dict[str, Finding]:
        before = tree(self.folder)
        found = examine(make_context(self.folder, **flags))
        assert tree(self.folder) == before, "the doctor only looks"
        assert [one.check for one in found] == CHECKS
        return {one.check: one for one in found}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world with nothing wrong, which no test may change."""
    world = World(tmp_path_factory.mktemp("sound"))
    make_recipe(world.folder)
    save_start(world.folder)
    return world


@pytest.fixture
def world(sound: World, tmp_path: Path) -> World:
    shutil.copytree(sound.folder, tmp_path / "world")
    for path in (tmp_path / "world").rglob("COMPLETE"):  # without digests of files: the doctor is to find the fault
        path.write_text('{"files": {}}\n')
    return World(tmp_path / "world")


def test_a_sound_run_passes(sound: World) -> None:
    found = sound.examined()
    assert {one.check: one.status for one in found.values()} == dict.fromkeys(CHECKS, OK)
    assert found["prompts"].detail == "12 for rollouts, 12 held out; columns prompt, answer, row"
    assert found["batch"].detail == "4 of 12 prompts per update, 4 completions in 1 minibatches"
    assert found["prompt length"].detail == f"the longest has 4 tokens; with a response of 10: 14 of {CONTEXT}"
    assert found["tokenizer"].detail == "EOS <eos> = 1, PAD <pad> = 0; ids to 16, 17 embedding rows"
    kl, mismatch = found["KL at the start"].detail.split()[0], found["ratio"].detail.split()[3]
    assert abs(float(kl)) < 1e-4 and float(mismatch) < 1e-5
    assert not (sound.folder / "run/ppo").exists()


def pads_with_eos(world: World) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(world.sft)


def numbers_the_policys_letters_backwards(world: World) -> None:
    for path in (world.sft, world.reward):
        make_tokenizer(BACKWARDS + ":;").save_pretrained(path)


def numbers_the_rewards_letters_backwards(world: World) -> None:
    make_tokenizer(BACKWARDS + ":;").save_pretrained(world.reward)


def lost_its_head(world: World) -> None:
    weights = load_file(world.reward / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, world.reward / "model.safetensors", metadata={"format": "pt"})


def scores_all_alike(world: World) -> None:
    model = make_reward_model()
    torch.nn.init.zeros_(model.score.weight)
    model.save_pretrained(world.reward)


def has_no_weights(world: World) -> None:
    (world.sft / "model.safetensors").unlink()


def own_data(world: World, change: Callable[[dict], dict]) -> None:
    """The recipe's data, changed in this world alone."""
    for path in (world.folder / "data/prompts").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    recipe = world.folder / "toy/recipe.yaml"
    recipe.write_text(f"description: A toy.\ndataset_name: {world.folder / 'data'}\n{EVALUATED}")


def long_prompts(world: World) -> None:
    own_data(world, lambda row: {**row, "prompt": row["prompt"] if row["row"] else "a" * (CONTEXT - 9)})


def no_prompt_column(world: World) -> None:
    own_data(world, lambda row: {"question": row["prompt"]})


def evaluates(**keys: Any) -> Callable[[World], None]:
    def plant(world: World) -> None:
        recipe = world.folder / "toy/recipe.yaml"
        shared = yaml.safe_load(recipe.read_text())
        recipe.write_text(yaml.safe_dump({**shared, "evaluation": {**shared["evaluation"], **keys}}))

    return plant


FAULTS: dict[str, tuple[Callable[[World], None] | None, dict[str, Any], str, str]] = {
    "PAD is EOS": (pads_with_eos, {}, "tokenizer", "set pad_token of the stage"),
    "policy's tokenizer swapped": (
        numbers_the_policys_letters_backwards, {}, "policy's tokenizer",
        "is not the one that the policy was trained with, as the policy's loss on the prompts is ",
    ),
    "reward's tokenizer swapped": (
        numbers_the_rewards_letters_backwards, {}, "reward model's tokenizer",
        "is not the SFT policy's, which the recipe's reward model is trained with: tokenizers may be swapped",
    ),
    "fresh reward head": (lost_its_head, {}, "reward head", "has no trained head (score.weight is missing"),
    "blind reward model": (scores_all_alike, {}, "reward reads the end", "it does not read the last token"),
    "no weights": (has_no_weights, {}, "policy", "cannot be loaded as a causal language model"),
    "prompts too long": (long_prompts, {}, "room", f"the longest prompt has {CONTEXT - 9} tokens, but"),
    "no column": (no_prompt_column, {}, "prompts", "has no column 'prompt', only 'question'"),
    "key": (None, {"kl_coff": 1}, "keys", "--ppo.kl_coff is not a key of the stage ppo, did you mean 'kl_coef'?"),
    "reward name": (
        None, {"reward_funcs": f"{BUILT_IN}:lenght(target=20,unit='words')"}, "reward functions",
        "There is no 'lenght' in the module 'rlhf_zoo.rewards.verifiable', did you mean 'length'?",
    ),
    "no answers": (
        None, {"reward_funcs": "exact_match(column='solution')"}, "answers",
        "reads the column 'solution', but the prompts have 'answer', 'row': name the column of the answers",
    ),
    "weights": (None, {"reward_weights": "1,2"}, "reward functions", "reward_weights has 2 numbers for 1 rewards"),
    "no labels": (
        evaluates(judge=None), {}, "judges",
        "The judge classifier has no labeled texts (The data set ",
    ),
    "no such judge": (evaluates(judge="clasifier"), {}, "judges", "did you mean 'classifier'?"),
    "few held-out prompts": (
        evaluates(prompts=99), {}, "evaluation's prompts",
        "The test split has 12 prompts, but evaluation.prompts is 99",
    ),
    "few prompts": (
        None, {"per_device_train_batch_size": 13}, "batch", "has 12 rows, but an update needs 13: use more prompts",
    ),
    "no such model": (None, {"model_name_or_path": "a b"}, "models", "The model a b cannot be found on"),
    "wrong count": (None, {"reward_funcs": "test_doctor:broken"}, "rewards", "returned 7 rewards for 8 completions"),
    "critic": (None, {"critic": "reward", "reward_model_path": "none", "reward_funcs": f"{BUILT_IN}:length"}, "trainer",
               "critic is 'reward', but no reward model has one output and the policy's tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_name(world: World, name: str) -> None:
    plant, flags, check, message = FAULTS[name]
    if plant is not None:
        plant(world)
    found = world.examined(**flags)
    assert (found[check].status, message in found[check].detail) == (FAILED, True), found[check]
    failed = [one for one in CHECKS if found[one].status == FAILED]
    assert failed == [check], "and nothing else is blamed"
    assert {one.detail for one in found.values() if one.status == SKIPPED} <= {
        f"needs the check {check!r}, which failed"
    }
    if check == "keys":
        assert all(found[one].status == SKIPPED for one in CHECKS[1:])
    elif flags:
        assert found["keys"].status == OK and found["epochs"].status == OK, "the others run"


# What only a changed trainer gets wrong


def failed(found: dict[str, Finding]) -> dict[str, str]:
    return {one.check: one.detail for one in found.values() if one.status == FAILED}


def trains_otherwise(trainer: Any) -> None:
    trainer.policy.lm_head.register_forward_hook(lambda head, _, logits: logits * 1.5 if head.training else logits)


def broadcasts(trainer: Any) -> None:
    trainer.token_rewards = lambda scores, kl, mask, kl_coef: (scores.unsqueeze(1) - kl_coef * kl) * mask


def fails(trainer: Any) -> None:
    raise ValueError("target modules\nmore")


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        (trains_otherwise, "ratio", "In the first pass log π differs from the sampler's"),
        (broadcasts, "rewards add up", "broadcast to every token"),
        (fails, "trainer", "ValueError: target modules"),
        (None, "KL at the start", "nats per completion, although the run starts at its reference"),
    ],
)
def test_a_changed_trainer(
    sound: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None] | None, check: str, message: str
) -> None:
    """None: the reference is not the policy."""
    build = doctor.build_trainer

    def changed(*args: Any, **kwargs: Any) -> Any:
        if change is None:
            return build(*args, **{**kwargs, "ref_model": make_policy(seed=9)})
        trainer = build(*args, **kwargs)
        change(trainer)
        return trainer

    monkeypatch.setattr(doctor, "build_trainer", changed)
    found = failed(sound.examined())
    assert found.keys() == {check} and message in found[check] and "\n" not in found[check]


def test_an_end_token_outside_the_mask(sound: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ppo_engines.sample

    def without_end(*args: Any, **kwargs: Any) -> Samples:
        samples = real(*args, **kwargs)
        mask = samples.mask.clone()
        mask[samples.ended, samples.mask.sum(1)[samples.ended] - 1] = False
        return replace(samples, mask=mask)

    monkeypatch.setattr(ppo_engines, "sample", without_end)
    found = failed(sound.examined())
    assert found.keys() == {"end tokens"} and "the end token must be the last one in the mask" in found["end tokens"]


# Warnings


def test_a_critic_that_is_no_number(world: World) -> None:
    critic = critic_from(make_reward_model())
    torch.nn.init.constant_(critic.score.bias, math.nan)
    critic.save_pretrained(world.folder / "critic")
    found = failed(world.examined(value_model_name_or_path=str(world.folder / "critic")))
    assert "The critic returned NaN or infinite values for 8 of 8" in found.pop("critic")
    assert found.keys() == {"end tokens"}, "the rollout takes its values"


@pytest.mark.parametrize(
    ("flags", "check", "message"),
    [
        ({"num_ppo_epochs": 5}, "epochs", "num_ppo_epochs is 5. After 4 epochs the policy is far from the rollout"),
        ({"kl_estimator": "k3"}, "trainer", "kl_estimator 'k3' in the reward follows"),
        (
            {"reward_model_path": "none", "reward_funcs": "test_doctor:alike"}, "rewards",
            "All 8 completions of the trial rollout score 0.25, so there is nothing to learn from them",
        ),
    ],
)  # fmt: skip
def test_a_warning_is_said_once_and_fails_nothing(
    sound: World, flags: dict[str, Any], check: str, message: str
) -> None:
    found = sound.examined(**flags)
    assert {one.check for one in found.values() if one.status != OK} == {check}
    assert found[check].status == WARNING and found[check].detail.startswith(message)


def test_a_policy_that_learned_nothing_is_a_warning(world: World) -> None:
    make_policy().save_pretrained(world.sft)
    found = world.examined()
    assert found["policy's tokenizer"].status == WARNING and "may be untrained" in found["policy's tokenizer"].detail
    assert not failed(found)


def test_the_judge_of_a_reward_model_that_was_trained_otherwise(world: World) -> None:
    recipe, reward = world.folder / "toy/recipe.yaml", world.folder / "toy/reward.yaml"
    said = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(said | {"evaluation": said["evaluation"] | {"judge": "same-labels"}}))
    reward.write_text("bf16: false\njudge_share: 0.5\n")
    found = world.examined()["judges"]
    assert (
        found.status == FAILED
        and "reserves no pairs: set judge_share there, for example to 0.5, and train it again with `" in found.detail
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
def test_other_settings_pass_as_well(sound: World, flags: dict[str, Any]) -> None:
    found = sound.examined(**flags)
    assert {one.check: one.detail for one in found.values() if one.status != OK} == {}
    if "ptx_coef" in flags:
        assert "12 texts for ptx_coef" in found["prompts"].detail and "8 completions" in found["batch"].detail


def test_data_of_the_run_are_read_where_they_lie(world: World) -> None:
    """A corpus prepares into the run directory; the doctor takes what is there, and otherwise prepares elsewhere."""
    (world.folder / "toy/recipe.yaml").write_text(
        "description: A toy.\ncorpus: rlhf_zoo.runs.corpora.tiny_world_2:prepare\n"
        f"corpus_args: {{lines: 300}}\n{EVALUATED}"
    )
    found = world.examined()
    assert found["prompts"].status == OK and "columns prompt" in found["prompts"].detail
    StageRecord(world.folder / "run/data").write(
        stage="data", recipe="toy", status="finished", resolved={"seed": 7}, fingerprint="of another run"
    )
    found = world.examined()
    assert found["prompts"].status == FAILED and "has a run with" in found["prompts"].detail
    assert found["policy"].status == OK


# The command


@pytest.fixture
def command(no_hub: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sound: World):
    """What the command prints, and its exit code, in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(sound.folder)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["rlhf-zoo", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def test_the_table_and_exit_codes(command: Callable[..., tuple[int, str]], sound: World) -> None:
    before = tree(sound.folder)
    code, shown = command("doctor", "toy", "--output_dir", "run")
    assert code == 0 and all(f" {check} " in shown for check in CHECKS) and "failed" not in shown
    code, shown = command("doctor", "toy", "--output_dir", "run", "--num_ppo_epochs", "5")
    assert code == 0 and " warning " in shown
    code, shown = command("doctor", "toy", "--output_dir", "run", "--ppo.reward_funcs", "x[red]:f", "--json")
    assert code == 2
    rows = {row["check"]: row for row in json.loads(shown)}
    wrong = rows["reward functions"]
    assert list(rows) == CHECKS and wrong["status"] == FAILED and "[red]" in wrong["detail"]
    assert tree(sound.folder) == before


def test_validate_loads_the_names_of_reward_functions(command: Callable[..., tuple[int, str]]) -> None:
    validate = ("recipes", "validate", "toy", "--ppo.reward_funcs")
    two = f'{BUILT_IN}:length(target=20,unit="words"),{BUILT_IN}:repetition'
    assert command(*validate, two) == (0, "toy is valid: sft, reward, ppo.\n")
    assert command(*validate, two, "--ppo.reward_weights", "1,2,3")[0] == 0
    assert command(*validate, two, "--ppo.reward_weights", "1,2")[0] == 2
    assert command(*validate, f"{BUILT_IN}:lenght")[0] == 2


def test_before_anything_is_trained(tmp_path: Path) -> None:
    """Through a process of its own, with a Hub that has nothing: what needs no model is checked, the rest skipped."""
    make_recipe(tmp_path)
    done = zoo(
        "doctor", "toy", "--output_dir", "run", "--reward_funcs", "lenght", "--json", home=tmp_path / "h", cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    status = {check: row["status"] for check, row in rows.items()}
    assert status.pop("reward functions") == FAILED
    ready = ("keys", "columns", "epochs", "prompts", "batch", "models", "room", "evaluation's prompts", "value model")
    assert status == {check: OK if check in ready else SKIPPED for check in status}
    assert rows["tokenizer"]["detail"] == "train the sft stage first"
    assert rows["reward head"]["detail"] == "train the reward stage first"
    assert "Not publishing." in done.stderr and "Publishing" not in done.stderr
    assert not (tmp_path / "run").exists() and PPO["max_steps"] == 3
    with pytest.raises(ZooError, match="There is no recipe 'none'"):
        cli.cli.main(["doctor", "none"], standalone_mode=False)


@pytest.mark.parametrize(
    ("place", "of"), [("ppo.reward_funcs", "A reward function"), ("evaluation.judge", "The judge rule:")]
)
def test_validate_tries_rewards_and_rules(
    command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, place: str, of: str
) -> None:
    name = "toy_run:answered" if place == "ppo.reward_funcs" else "rule:toy_run:answered"
    assert command("recipes", "validate", "toy", f"--{place}", name) == (0, "toy is valid: sft, reward, ppo.\n")

    def broken(completions: list[str], row: list[int], **_: Any) -> list[float]:
        raise ValueError(f"broken at row {row[0]}")

    monkeypatch.setattr("toy_run.answered", broken)
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    assert command("recipes", "validate", "toy", f"--{place}", name) == (2, "")
    assert of in errors.getvalue() and "broken at row 0" in errors.getvalue() and errors.getvalue().count("\n") == 1

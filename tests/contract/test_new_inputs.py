"""`rlhf-zoo new` tokenizes each text once, and reports unusable models and data in one sentence."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import miniatures
import pytest
import schemas

from rlhf_zoo.cli import main as cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.new import sizes
from rlhf_zoo.pipeline.new.recipe import make_recipe, write
from rlhf_zoo.pipeline.new.request import RecipeRequest
from rlhf_zoo.pipeline.new.sizes import MAX_EPISODES, Decisions, add_episodes, choose_batches

PAIRS = "trl-lib/tldr-preference"


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untraced: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def zoo(*words: str) -> None:
    cli.cli.main(list(words), standalone_mode=False)


def test_new_tokenizes_each_prompt_and_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT reads the chosen answers of the reward model's pairs, and PPO their prompts."""
    miniatures.save("Llama 3", Path("base"))
    schemas.write_data(Path(PAIRS), schemas.rows_of(PAIRS))
    tokenized: dict[str, list[str]] = {}
    for name in ("tokenize_prompt", "tokenize_for_reward"):
        tokenize = getattr(sizes, name)

        def count(text: Any, *args: Any, name: str = name, tokenize: Any = tokenize, **kwargs: Any) -> Any:
            tokenized.setdefault(name, []).append(repr(text))
            return tokenize(text, *args, **kwargs)

        monkeypatch.setattr(sizes, name, count)
    zoo("new", "mine", "--model", "base", "--preferences", PAIRS, "--judge", 'rule:length(unit="words")')
    rows = len({row["prompt"] for row in schemas.rows_of(PAIRS)})
    for texts in tokenized.values():
        assert len(texts) == len(set(texts)) >= rows


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "pairs.jsonl",
            "--model is pairs.jsonl, which is not a model: pass a model's folder, a GGUF file, or NAMESPACE/NAME.",
        ),
        ("folder", "has no config.json: pass the folder of a model, or NAMESPACE/NAME."),
    ],
)
def test_new_rejects_file_or_folder_that_is_not_a_model(model: str, message: str) -> None:
    Path("folder").mkdir()
    Path("pairs.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n')
    with pytest.raises(ZooError, match=re.escape(message)):
        zoo("new", "mine", "--model", model, "--preferences", "pairs.jsonl")


def test_new_reports_unreadable_data_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    miniatures.save("GPT-2", Path("base"))
    Path("notes.jsonl").write_text("not JSON\n")
    Path("empty").mkdir()
    for name, problem in (("notes.jsonl", "line 1 of notes.jsonl is not JSON"), ("empty", "empty holds no data files")):
        with pytest.raises(ZooError, match=problem):
            zoo("new", "mine", "--model", "base", "--preferences", name)
    assert not [record for record in caplog.records if record.name.startswith("datasets")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("num_mini_batches: 7", "num_mini_batches 7 does not divide the rollout of"),
        ("cliprnge: 0.2", "has cliprnge, which is not a key of the stage ppo, did you mean 'cliprange'"),
        ("kl_coef: -1", "kl_coef"),
        ("kl_estimator: k2", "kl_estimator 'k2' does not work in the reward"),
        ("eval_strategy: sometimes", "eval_strategy in .* is 'sometimes', but it takes one of no, steps, epoch"),
        ("release: newest", "release in .* is 'newest', but it takes one of last, best, recommended"),
        ("release: best", "release: best of the stage ppo needs metric_for_best_model"),
        ("push_steps: 7", "push_steps of the stage ppo is 7, but checkpoints are saved by"),
        ("dtype: float16", "dtype of the stage ppo is 'float16'"),
        ("columns: {prompt: question}", "question"),
    ],
)
def test_new_checks_recipe_without_trainers(line: str, message: str) -> None:
    miniatures.save("GPT-2", Path("base"))
    schemas.write_data(Path("asked"), [{"prompt": f"what is {row}", "completion": f"{row}"} for row in range(240)])
    recipe = make_recipe(RecipeRequest(model="base", prompts="asked", rewards=("length",)), title="mine")
    key = line.partition(":")[0]
    other_lines = [text for text in recipe.files["ppo.yaml"].splitlines() if not text.startswith(f"{key}:")]
    changed = replace(recipe, files={**recipe.files, "ppo.yaml": "\n".join([*other_lines, line])})
    with pytest.raises(ZooError, match=message):
        write(changed, Path("mine"))
    assert not Path("mine").exists()


def test_few_prompts_get_more_passes_and_few_updates_a_warning() -> None:
    for trained, episodes, reason in (
        (128, 2560, "40 updates of 64 answers, 20 passes over 128 prompts"),
        (6400, 6400, "100 updates of 64 answers"),
        (100_000, 20_000 // 64 * 64, "312 updates of 64 answers"),
    ):
        decisions, sizes = Decisions(), {"trained_rows": trained, **choose_batches(trained, 64, MAX_EPISODES)}
        add_episodes(sizes, decisions)
        assert decisions.rows == [("total_episodes", str(episodes), reason)]
    add_episodes({"trained_rows": 128, **choose_batches(128, 64, 128)}, decisions, "two hours")
    assert decisions.rows[0][2].startswith("2 updates of 64 answers; two hours; TOO FEW UPDATES")

"""`rlhf-zoo eval POLICY --against OTHER` measures published policies by every kind of judge, and writes into cards."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from finished_run import Run
from folders import write_data_set
from hub_fixture import RunningHub, running
from json_keys import unexplained
from miniatures import save_two_label_classifier
from page_fixture import PPO, publish
from stub_llm import StubLLM, longer
from test_votes_train import cast_votes
from toy_models import Toys, save_toys
from zoo_process import errors

GOOD, BAD = ("sharp", "good", "clear", "bright", "fair", "long"), ("weak", "slow", "heavy", "menu", "but", "price")
VOTES = "local/toy-votes"


def write_data(folder: Path) -> Path:
    """A data set with prompts, the classifier's labeled texts, and labeled pairs."""
    texts = [
        (f"the camera is {word} and the battery is {word} {n}", word in GOOD) for n in range(12) for word in GOOD + BAD
    ]
    rows = {
        "prompts": {"test": [{"prompt": f"the {part} is"} for part in ("battery", "camera", "screen", "sound")] * 6},
        "judge": {"train": [{"text": text, "label": int(good)} for text, good in texts]},
        "preferences": {
            "test": [
                {"prompt": f"the camera {n} is", "chosen": f" {good}", "rejected": f" {bad}"}
                for n, (good, bad) in enumerate(zip(GOOD * 8, BAD * 8, strict=True))
            ]
        },
    }
    return write_data_set(folder, rows)


@dataclass(frozen=True, kw_only=True)
class Place(Run):
    """A folder with data, and a Hub with toy models."""

    server: RunningHub
    toys: Toys
    data: Path

    def eval(self, *arguments: str | Path, **env: str) -> Any:
        return self.zoo("eval", *arguments, "--hub", self.server.url, **env)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("eval")
    with running(folder / "hub") as hub:
        toys = save_toys(folder / "toys")
        publish(hub, toys)
        token = {"RLHF_ZOO_HUB_TOKEN": hub.token}
        yield Place(folder, token, server=hub, toys=toys, data=write_data(folder / "data"))


def test_eval_policy_runs_every_kind_of_judge(place: Place) -> None:
    """SFT and reward model come from the card, at its commits. The judges include an LLM and people's votes."""
    api = place.server.api()
    sft = json.loads(Path(api.hf_hub_download(PPO, "rlhf_card.json")).read_text())["parents"]["sft"]["commit"]
    assert sft != api.model_info("local/toy-sft").sha
    votes = [
        (f"the battery {n} is", " good", " weak", "left" if n < 6 else "tie" if n < 8 else "both_bad") for n in range(9)
    ]
    cast_votes(place.server, place.folder, VOTES, votes)
    judges = [
        "classifier",
        'rule:length(target=4, unit="words")',
        "reward:local/toy-reward@main",
        "llm:stub",
        f"votes:{VOTES}",
    ]
    with StubLLM(longer, key="secret") as stub:
        flags = [word for judge in judges for word in ("--judge", judge)]
        arguments = [f"{PPO}@step-40", *flags, "--dataset_name", place.data, "--prompts", "20", "--samples", "2"]
        env = {"OPENAI_BASE_URL": stub.url, "OPENAI_API_KEY": "secret"}
        done = place.eval(*arguments, "--llm", '{"price": [1, 2], "budget": 5}', "--json", **env)
        assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert unexplained(report) == []
    assert report["policy"]["commit"] == api.model_info(PPO, revision="step-000040").sha
    assert report["against"]["commit"] == sft
    assert (report["n"], report["prompts"], report["rows"]) == (40, 4, 20), "20 rows of 4 different prompts"
    assert report["max_new_tokens"] == 12 and report["temperature"] == 0.9
    assert list(report["judges"]) == judges[:4]
    own = report["judges"]["reward:local/toy-reward@main"]
    assert own["is_training_reward"] and "training worked" not in done.stderr, "--json prints only figures"
    assert not report["judges"]["classifier"]["is_training_reward"] and report["judge"]["name"] == "classifier"
    assert report["win_rate"] == report["judges"]["classifier"]["win_rate"]
    assert report["judge"]["check"]["finding"] == "agrees" and report["judge"]["check"]["accuracy"]["n"] == 48
    for name in ("reward", "judge", "length", "eos_rate", "repetition", "distinct_1", "distinct_2", "sft_perplexity"):
        gap = report["difference"][name]
        assert gap["value"] == pytest.approx(report["ppo"][name]["value"] - report["sft"][name]["value"], abs=1e-9)
        assert gap["ci95"][0] <= gap["value"] <= gap["ci95"][1] and gap["n"] == 40
    llm = report["judges"]["llm:stub"]
    assert llm["orders"]["agreement"]["value"] == 1.0 and llm["usage"]["cost"] > 0
    assert llm["usage"]["requests"] == len(stub.requests)
    text = (place.folder / "runs/eval/local--toy-ppo--step-000040/samples.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 40
    sizes = [(len(row["ppo"]["completion"]), len(row["sft"]["completion"])) for row in rows]
    expected = sum(1.0 if ours > theirs else 0.5 if ours == theirs else 0.0 for ours, theirs in sizes) / 40
    assert llm["win_rate"]["value"] == pytest.approx(expected) and expected != 0.5
    kl = sum(row["ppo"]["kl"] for row in rows) / 40
    assert report["ppo"]["kl"]["value"] == pytest.approx(kl) and abs(report["sft"]["kl"]["value"]) < 1e-5
    assert abs(kl - report["ppo"]["exact_kl"]["value"]) < 1.0 and report["ppo"]["exact_kl"]["value"] > 0
    perplexity = report["ppo"]["sft_perplexity"]["value"]
    assert math.isfinite(perplexity) and perplexity > 1
    # The votes of `cast_votes` are on other commits.
    assert report["votes"][VOTES]["win_rate"] is None
    assert report["votes"][VOTES]["problem"] == f"None of the 9 votes in {VOTES} compares these two policies."


def test_eval_policy_writes_figures_into_card(place: Place) -> None:
    """A second evaluation replaces the first one in the card; a judge that contradicts the labels is reported."""

    def prefer_bad(data: dict[str, str]) -> str:
        return json.dumps({"verdict": "tie"} if "A" in data else {"rating": 1 if data["completion"][1:] in GOOD else 9})

    def read_file(name: str) -> str:
        return Path(api.hf_hub_download(PPO, name)).read_text()

    api = place.server.api()
    before = read_file("README.md")
    arguments = [PPO, "--dataset_name", place.data, "--prompts", "8", "--samples", "1", "--push_to_hub"]
    for _ in range(2):
        done = place.eval(*arguments)
        assert done.returncode == 0, done.stderr
    assert "win rate, by classifier" in done.stdout and "control: against itself, another seed" in done.stdout
    card = read_file("README.md")
    assert card.startswith(before.rstrip()) and card.count("## Evaluation against") == 1
    assert "| **win rate**, by classifier |" in card and "labeled pairs correctly" in card
    files = api.list_repo_files(PPO)
    files_by_name = {Path(name).name: name for name in files if name.startswith("evaluations/")}
    assert set(files_by_name) == {"evaluation.json", "samples.jsonl", "win_rates.png"} and "model.safetensors" in files
    assert json.loads(read_file(files_by_name["evaluation.json"]))["policy"]["name"] == PPO

    with StubLLM(prefer_bad) as stub:
        done = place.eval(*arguments, "--judge", "llm:stub", "--output_dir", "llm", OPENAI_BASE_URL=stub.url)
    assert done.returncode == 0 and "llm:stub: The judge contradicts the labels" in done.stderr, done.stderr
    assert "**The judge contradicts the labels" in read_file("README.md").split("**Judge:** llm:stub")[1].split("\n")[0]


def test_eval_policy_on_folders_needs_no_hub_or_reward_model(place: Place) -> None:
    done = place.eval(
        place.toys.ppo, "--against", place.toys.sft, "--reward", "none", "--dataset_name", place.data, "--prompts", "8",
        "--samples", "1", "--temperature", "0.7", "--max_new_tokens", "6", "--seed", "3", "--output_dir", "plain",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["reward"] is None and "reward" not in report["ppo"] and "agreement" not in report
    assert (report["temperature"], report["max_new_tokens"], report["seed"]) == (0.7, 6, 3)


def test_eval_policy_reads_other_columns_and_label_judge(place: Place) -> None:
    """A file with other column names, and a classifier's probability of one label as the judge."""
    (place.folder / "comments.jsonl").write_text(
        "".join(json.dumps({"comment": f"the {part} of mine is"}) + "\n" for part in ("battery", "camera") * 10)
    )
    save_two_label_classifier(place.folder / "two", place.toys.reward)
    done = place.eval(
        place.toys.ppo, "--against", place.toys.sft, "--reward", "none", "--dataset_name", "comments.jsonl",
        "--columns", '{"prompt": "{comment:1-3 words}"}', "--judge", "reward:two#good", "--prompts", "20",
        "--samples", "1", "--max_new_tokens", "6", "--output_dir", "label", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert unexplained(report) == [] and report["terms"]["columns"] == {"prompt": "{comment:1-3 words}"}
    assert report["judge"]["name"] == "reward:two#good" and 0 < report["ppo"]["judge"]["value"] < 1
    rows = [json.loads(line) for line in (place.folder / "label/samples.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in rows} <= {
        f"the {part} of"[: len(row["prompt"])] for part in ("battery", "camera") for row in rows
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PPO], "Neither the run nor the card of local/toy-ppo names a data set with prompts: pass one with"),
        (["toys/ppo", "--against", "toys/sft", "--dataset_name", "data", "--push_to_hub"], "toys/ppo is a folder, but"),
        (
            [PPO, "--dataset_name", "data", "--judge", "classifier", "--judge", "votes:local/none"],
            "The judge votes:local/none cannot be found on",
        ),
    ],
)
def test_eval_policy_rejects_invalid_arguments(place: Place, arguments: list[str], message: str) -> None:
    """tests/unit/test_policies.py has the cases that need no process."""
    done = place.eval(*arguments, "--output_dir", "bad")
    assert done.returncode == 2 and message in errors(done.stderr)[-1], done.stderr
    assert "Traceback" not in done.stderr and not (place.folder / "bad").exists()
